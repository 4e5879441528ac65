// What the CPU can run, and the system lets it run.
#pragma once

namespace cllm {

bool runs_avx2();     // with FMA and F16C
bool runs_avxvnni();  // the above, and the dot product of bytes in 256 bits
bool runs_avx512();   // F, BW, VL, DQ and VNNI
bool has_amx();       // the above, and tiles of bytes; the system hands them out on request only
// Asks the system, once, to let this process have tiles, which all its threads then may use. False if it refuses. Only where
// there is AMX. It costs nothing until a thread uses them.
bool take_amx();

}  // namespace cllm
