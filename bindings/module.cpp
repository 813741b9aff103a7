#include <pybind11/pybind11.h>

#include "bind.h"

PYBIND11_MODULE(_core, module) {
  module.doc() = "The C++ half of kvpool. Use it through the package `kvpool`.";
  module.attr("__version__") = KVPOOL_VERSION;
  kvpool::bindings::bind_errors(module);
  kvpool::bindings::bind_machine(module);
  kvpool::bindings::bind_collection(module);
  kvpool::bindings::bind_heartbeat(module);
  kvpool::bindings::bind_addresses(module);
  kvpool::bindings::bind_handles(module);
  kvpool::bindings::bind_events(module);
  kvpool::bindings::bind_tensor(module);
  kvpool::bindings::bind_space(module);
  kvpool::bindings::bind_pool(module);
  kvpool::bindings::bind_prompt_index(module);
  kvpool::bindings::bind_instance_index(module);
  kvpool::bindings::bind_keyed_index(module);
  kvpool::bindings::bind_keyed_cache(module);
  kvpool::bindings::bind_reshard(module);
  kvpool::bindings::show_signatures(module);
  kvpool::bindings::install_fast_methods(module);
}
