// A mapped file that somebody cuts short, or whose disk fails, is a signal to whoever reads it: SIGBUS.
#pragma once

#include <string>

namespace cllm {

// From now on such a signal prints `line` (one that nobody reads is lost) and ends the process with `exit_code`.
void end_on_bus_error(const std::string& line, int exit_code);

}  // namespace cllm
