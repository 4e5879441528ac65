// What the CPU can run, and the system lets it run.
#pragma once

namespace cllm {

bool runs_avx2();     // with FMA and F16C
bool runs_avxvnni();  // the above, and the dot product of bytes in 256 bits
bool runs_avx512();   // F, BW, VL, DQ and VNNI
// The above, and tiles of bytes. The first call asks the system to let this process have them, which all its threads then
// may use; it costs nothing until one does.
bool runs_amx();

}  // namespace cllm
