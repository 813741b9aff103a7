// The settings of single transports.
#pragma once

#include <string>

#include "kvpool/routes/nccl/nccl_limits.h"

namespace kvpool {

struct TransportSettings {
  std::string ucx = "wheel";   // wheel | system | path of libucp; used when a route is "ucx"
  std::string nccl = "wheel";  // wheel | system | path of libnccl; used when a route is "nccl"
  NcclLimits nccl_limits;
};

}  // namespace kvpool
