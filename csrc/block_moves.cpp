#include "block_moves.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "stream_copy.h"

namespace cllm {

namespace {

constexpr size_t kPage = 4096;
// Bytes that a thread copies at a time: few enough to split a block among threads, enough for hardware prefetching.
constexpr size_t kLeastPiece = 4 * kPage, kMostPiece = 128 * kPage;
constexpr int kPiecesPerThread = 4;

}  // namespace

void BlockMover::move(const BlockMove* moves, size_t count, uint8_t* arena, size_t block_bytes, int64_t blocks,
                      Team& team) {
    plan(moves, count, blocks);
    order_by_wave();
    cut(block_bytes, team.size());
    const bool streams = choice_.streams();
    const Turn turn(team);
    const auto started = std::chrono::steady_clock::now();
    const Piece* wave = pieces_.data();
    for (const size_t end : piece_ends_) {
        const Piece* const wave_end = pieces_.data() + end;
        team.share(wave_end - wave, 1, [&](int, int64_t first, int64_t last) {
            for (const Piece* piece = wave + first; piece < wave + last; ++piece)
                (streams ? stream_copy : plain_copy)(arena + piece->target, arena + piece->source, piece->bytes);
        });
        wave = wave_end;
    }
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - started;
    choice_.learn(streams, copies_.size() * block_bytes, taken.count());
}

bool CopyChoice::streams() const {
    if (bytes_per_s_[0] == 0.0 || bytes_per_s_[1] == 0.0) return bytes_per_s_[1] == 0.0;
    return (bytes_per_s_[1] >= bytes_per_s_[0]) != (calls_ % kTryOtherEvery == 0);
}

void CopyChoice::learn(bool streamed, size_t bytes, double seconds) {
    if (bytes == 0 || seconds <= 0.0) return;
    constexpr double kNewest = 0.25;
    double& known = bytes_per_s_[streamed];
    const double newest = double(bytes) / seconds;
    known = known == 0.0 ? newest : known + kNewest * (newest - known);
    ++calls_;
}

// Fills copies_, in an order in which they would be right one after another, with their waves.
void BlockMover::plan(const BlockMove* moves, size_t count, int64_t blocks) {
    size_t total = 0;
    for (size_t i = 0; i < count; ++i) total += size_t(moves[i].count);
    const bool waves_run_out = last_wave_ > UINT32_MAX - total - 1;
    if (read_.size() != size_t(blocks) || waves_run_out) {
        read_.assign(size_t(blocks), 0);
        written_.assign(size_t(blocks), 0);
        last_wave_ = 0;
    }
    first_wave_ = last_wave_ + 1;
    copies_.clear();
    copies_.reserve(total);
    for (size_t i = 0; i < count; ++i) {
        const BlockMove& move = moves[i];
        if (move.source == move.target) continue;
        const bool slides_up = move.source < move.target && move.target - move.source < move.count;
        for (int32_t k = 0; k < move.count; ++k) {
            const int32_t at = slides_up ? move.count - 1 - k : k;
            add(move.source + at, move.target + at);
        }
    }
}

void BlockMover::add(int32_t source, int32_t target) {
    uint32_t& written = written_[size_t(target)];
    uint32_t& read = read_[size_t(source)];
    const uint32_t before = std::max({written_[size_t(source)], written, read_[size_t(target)]});
    const uint32_t wave = std::max(first_wave_, before + 1);
    written = wave;
    read = std::max(read, wave);
    last_wave_ = std::max(last_wave_, wave);
    copies_.push_back({source, target, wave});
}

// Fills ordered_ and wave_ends_. Within a wave the order stays, so that neighbours stay neighbours.
void BlockMover::order_by_wave() {
    wave_ends_.assign(copies_.empty() ? 0 : last_wave_ - first_wave_ + 1, 0);
    for (const Copy& copy : copies_) ++wave_ends_[copy.wave - first_wave_];
    size_t begin = 0;
    for (size_t& end : wave_ends_) begin += std::exchange(end, begin);
    ordered_.resize(copies_.size());
    for (const Copy& copy : copies_) ordered_[wave_ends_[copy.wave - first_wave_]++] = copy;
}

// Fills pieces_ and piece_ends_, wave by wave.
void BlockMover::cut(size_t block_bytes, int threads) {
    pieces_.clear();
    piece_ends_.clear();
    size_t first = 0;
    for (const size_t last : wave_ends_) {
        const size_t each = (last - first) * block_bytes / size_t(threads * kPiecesPerThread);
        cut_wave(first, last, block_bytes, std::min(kMostPiece, std::max(kLeastPiece, each / kPage * kPage)));
        piece_ends_.push_back(pieces_.size());
        first = last;
    }
}

// The copies [first, last) of ordered_: adjacent blocks become runs, and those are cut into pieces.
void BlockMover::cut_wave(size_t first, size_t last, size_t block_bytes, size_t piece_bytes) {
    while (first < last) {
        int32_t source = ordered_[first].source, target = ordered_[first].target;
        int32_t count = 1;
        for (++first; first < last; ++first, ++count) {
            const Copy& next = ordered_[first];
            if (next.source == source + count && next.target == target + count) continue;
            if (next.source != source - 1 || next.target != target - 1) break;
            --source, --target;
        }
        add_run(source, target, size_t(count), block_bytes, piece_bytes);
    }
}

void BlockMover::add_run(int32_t source, int32_t target, size_t count, size_t block_bytes, size_t piece_bytes) {
    const size_t bytes = count * block_bytes;
    for (size_t at = 0; at < bytes; at += piece_bytes)
        pieces_.push_back({size_t(source) * block_bytes + at, size_t(target) * block_bytes + at,
                           std::min(piece_bytes, bytes - at)});
}

}  // namespace cllm
