// NCCL, opened at run time: a table of the functions that kvpool calls.
//
// kvpool uses only functions of NCCL 2.18. The configuration carries a size and a version, so newer versions can read
// it. kvpool declares what it needs, so building it needs no nccl.h.
//
// NCCL refuses two ranks on one GPU unless their processes have different values of the environment variable
// NCCL_HOSTID, set before NCCL is first used; then they communicate over sockets.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "kvpool/base/error.h"
#include "kvpool/cuda/driver.h"

namespace kvpool {

using NcclResult = int;
using NcclComm = void*;

inline constexpr NcclResult kNcclSuccess = 0;
inline constexpr NcclResult kNcclRemoteError = 6;
inline constexpr NcclResult kNcclInProgress = 7;
inline constexpr int kNcclInt8 = 0;
inline constexpr int kNcclVersionMin = 21800;  // 2.18.0

struct NcclId {  // ncclUniqueId
  char bytes[128];
};
static_assert(sizeof(NcclId) == 128);

struct NcclConfig {  // ncclConfig_t, as of 2.18
  std::size_t size;
  unsigned magic;
  unsigned version;
  int blocking;
  int cga_cluster_size;
  int ctas_min;
  int ctas_max;
  const char* net_name;
  int split_share;
};
static_assert(sizeof(NcclConfig) == 48);

struct NcclLibrary {
  std::string path;  // of libnccl
  int version = 0;   // 22809 is 2.28.9

  NcclResult (*get_version)(int* version) = nullptr;
  NcclResult (*get_unique_id)(NcclId* id) = nullptr;
  NcclResult (*comm_init_rank_config)(NcclComm* comm, int ranks, NcclId id, int rank, NcclConfig* config) = nullptr;
  NcclResult (*comm_get_async_error)(NcclComm comm, NcclResult* error) = nullptr;
  NcclResult (*comm_abort)(NcclComm comm) = nullptr;
  NcclResult (*group_start)() = nullptr;
  NcclResult (*group_end)() = nullptr;
  NcclResult (*send)(const void* from, std::size_t count, int type, int peer, NcclComm comm, CuStream stream) = nullptr;
  NcclResult (*recv)(void* to, std::size_t count, int type, int peer, NcclComm comm, CuStream stream) = nullptr;
  const char* (*get_error_string)(NcclResult result) = nullptr;
  const char* (*get_last_error)(NcclComm comm) = nullptr;

  // "2.28.9"
  std::string version_text() const;
  // The error for a result, with NCCL's text, the call's name and the field `nccl_code`. The code is kUnsupported if a
  // retry would fail in the same way, otherwise kRouteFailed: the peer may be well, and the link stays in use.
  Error error_of(NcclResult result, const char* call, NcclComm comm = nullptr) const;
  void require(NcclResult result, const char* call, NcclComm comm = nullptr) const;
};

// `where`: "system", or the path of libnccl.so.2, or of a folder that contains it (or whose lib folder does), such as
// the wheel's. Opened once for each path, and never closed, because NCCL has threads. Thread-safe. Throws kUnsupported;
// the text says what to install.
const NcclLibrary& load_nccl(const std::string& where);

}  // namespace kvpool
