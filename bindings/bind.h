// The parts of the extension module; each registers its classes.
#pragma once

#include <pybind11/pybind11.h>

namespace kvpool::bindings {

void bind_errors(pybind11::module_& module);
void bind_handles(pybind11::module_& module);
void bind_events(pybind11::module_& module);
void bind_tensor(pybind11::module_& module);
void bind_pool(pybind11::module_& module);
void bind_prompt_index(pybind11::module_& module);
void bind_instance_index(pybind11::module_& module);
void bind_machine(pybind11::module_& module);

}  // namespace kvpool::bindings
