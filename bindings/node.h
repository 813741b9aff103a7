// kvpool._core.Pool is a node: a pool with its peers. Most of its methods are the pool's own.
#pragma once

#include <memory>
#include <utility>

#include "bind.h"
#include "kvpool/peers/peer_node.h"
#include "kvpool/pool/pool.h"

namespace kvpool::bindings {

// The node's pool; keeps the node.
inline PoolPointer pool_of(const NodePointer& node) { return {node, &node->pool()}; }

template <class Result, class... Arguments>
auto node_method(Result (*call)(Pool&, Arguments...)) {
  return [call](PeerNode& node, Arguments... arguments) -> Result {
    return call(node.pool(), std::forward<Arguments>(arguments)...);
  };
}

template <class Result, class... Arguments>
auto node_method(Result (*call)(const PoolPointer&, Arguments...)) {
  return [call](const NodePointer& node, Arguments... arguments) -> Result {
    return call(pool_of(node), std::forward<Arguments>(arguments)...);
  };
}

// A function that takes a pool, or a lambda without captures, as a method of the node that holds the pool.
template <class Call>
auto of_pool(Call call) {
  return node_method(+call);
}

}  // namespace kvpool::bindings
