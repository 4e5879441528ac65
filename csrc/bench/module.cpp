// The limits of this machine, which `cllm bench` measures the engine against. Not part of the engine.
#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>

#include <map>
#include <string>

#include "limits.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

std::map<std::string, double> limits(const std::string& instruction_set, int threads, double seconds, size_t model_bytes) {
    const cllm::MachineLimits found = cllm::measure_limits(instruction_set.c_str(), threads, seconds, model_bytes);
    return {{"int8_macs_per_s", found.int8_macs_per_s},
            {"grouped_int8_macs_per_s", found.grouped_int8_macs_per_s},
            {"read_bytes_per_s", found.read_bytes_per_s},
            {"model_read_bytes_per_s", found.model_read_bytes_per_s}};
}

}  // namespace

NB_MODULE(_limits, m) {
    m.def("measure_limits", &limits, "instruction_set"_a, "threads"_a, "seconds"_a, "model_bytes"_a);
    m.def("measure_copy", &cllm::measure_copy, "threads"_a, "seconds"_a, "bytes"_a, nb::call_guard<nb::gil_scoped_release>());
}
