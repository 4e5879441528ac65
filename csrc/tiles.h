// AMX's tile registers: eight of up to 16 rows of 64 bytes. Only for files that are compiled with AMX.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace cllm {

constexpr int kTileLines = 16, kTileLineBytes = 64;

// The sizes of the registers, as the CPU takes them.
struct alignas(64) TileShapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t line_bytes[16] = {};
    uint8_t lines[16] = {};

    void set(int tile, int n_lines, int bytes) {
        lines[tile] = uint8_t(n_lines);
        line_bytes[tile] = uint16_t(bytes);
    }
};
static_assert(sizeof(TileShapes) == 64, "the CPU reads 64 bytes");

// The calling thread holds tiles while this lives; otherwise the system has none to save when it switches threads.
class Tiles {
public:
    explicit Tiles(const TileShapes& shapes) {
        // The compiler's header declares only the first few of the bytes that the CPU reads.
        const TileShapes* all = &shapes;
        __asm__ volatile("" : "+r"(all) : : "memory");
        _tile_loadconfig(all);
    }
    ~Tiles() { _tile_release(); }
    Tiles(const Tiles&) = delete;
    Tiles& operator=(const Tiles&) = delete;
};

}  // namespace cllm
