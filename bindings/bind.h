// The parts of the extension module; each registers its classes.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "kvpool/arena/arena.h"
#include "kvpool/base/error.h"

namespace kvpool {
class PeerNode;
class Pool;
}  // namespace kvpool

namespace kvpool::bindings {

using NodePointer = std::shared_ptr<PeerNode>;
using PoolPointer = std::shared_ptr<Pool>;
using PoolClass = pybind11::class_<PeerNode, NodePointer>;  // node.h

void bind_errors(pybind11::module_& module);
void bind_addresses(pybind11::module_& module);
void bind_handles(pybind11::module_& module);
void bind_events(pybind11::module_& module);
void bind_tensor(pybind11::module_& module);
void bind_pool(pybind11::module_& module);
void bind_prompt_index(pybind11::module_& module);
void bind_instance_index(pybind11::module_& module);
void bind_keyed_index(pybind11::module_& module);
void bind_keyed_cache(pybind11::module_& module);  // after bind_pool and bind_keyed_index
void bind_heartbeat(pybind11::module_& module);
void bind_machine(pybind11::module_& module);
void bind_collection(pybind11::module_& module);
void bind_reshard(pybind11::module_& module);
void bind_space(pybind11::module_& module);       // before bind_pool
void show_signatures(pybind11::module_& module);  // after all of them

// Puts fast methods of the pool in the places of those of pybind11, with their docstrings. After show_signatures().
void install_fast_methods(pybind11::module_& module);

// Methods of the pool that cache prompts. bind_pool calls it.
void bind_prompts(PoolClass& pool);

// Methods of the pool that move and copy blocks between its tiers, and the classes that they return. bind_pool calls
// them.
void bind_swap(pybind11::module_& module, PoolClass& pool);
void bind_copies(pybind11::module_& module, PoolClass& pool);

// Methods of the pool with which an engine takes HBM back for a while. bind_pool calls it.
void bind_suspend(PoolClass& pool);

// Methods of the pool for blocks on DISK. bind_pool calls it.
void bind_disk(PoolClass& pool);

// Sequences and attention: methods of the pool and the classes that they return. bind_pool calls bind_attend.
void bind_partial(pybind11::module_& module);
void bind_attend(pybind11::module_& module, PoolClass& pool);

// Methods of the pool that need peers, and the classes that they return. bind_pool calls them.
void bind_service(pybind11::module_& module, PoolClass& pool);
void bind_members(PoolClass& pool);
void bind_ranks(pybind11::module_& module, PoolClass& pool);
void bind_transfer(pybind11::module_& module, PoolClass& pool);
void bind_peer_match(pybind11::module_& module, PoolClass& pool);
void bind_received(pybind11::module_& module, PoolClass& pool);

// SHA-256 of the C++ sources that this module is compiled from: cmake/sources_digest.cmake.
extern const char* const kSourcesDigest;

// A setting.
HugePages huge_pages_named(const std::string& name);

// The name of the class in kvpool.errors for an error of the core.
const char* class_of(ErrorCode code);

// The exception of Python that an error of the core becomes.
pybind11::object exception_from(const Error& error);

}  // namespace kvpool::bindings
