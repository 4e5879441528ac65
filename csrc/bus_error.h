// Reading a mapped file that was truncated, or whose disk fails, raises SIGBUS.
#pragma once

#include <string>

namespace cllm {

// From now on SIGBUS prints `line` (without waiting for a reader) and ends the process with `exit_code`.
void end_on_bus_error(const std::string& line, int exit_code);

}  // namespace cllm
