// What the CPU can run, and the system lets it run.
#pragma once

namespace cllm {

bool runs_avx2();     // with FMA and F16C
bool runs_avxvnni();  // the above, and the dot product of bytes in 256 bits
bool runs_avx512();   // F, BW, VL, DQ and VNNI
bool has_amx();       // the above, and tiles of bytes, which the system grants on request
// Asks the system, once, for permission to use tiles in all threads of this process; false if it refuses. Requires AMX.
// Costs nothing until a thread uses them.
bool take_amx();

}  // namespace cllm
