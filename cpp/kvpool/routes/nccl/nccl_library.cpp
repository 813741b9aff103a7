#include "kvpool/routes/nccl/nccl_library.h"

#include <dlfcn.h>
#include <sys/stat.h>

#include <map>
#include <memory>
#include <mutex>
#include <type_traits>

namespace kvpool {
namespace {

constexpr const char* kName = "libnccl.so.2";
constexpr const char* kAdvice =
    "; install the extra kvpool[nccl12] or kvpool[nccl13] for the wheel's, or a system package (libnccl2) of 2.18 or "
    "newer and choose it with KVPOOL_NCCL=system, or its folder with KVPOOL_NCCL=PATH";

[[noreturn]] void refuse(const std::string& why) { throw Error(ErrorCode::kUnsupported, "no NCCL: " + why + kAdvice); }

bool is_file(const std::string& path) {
  struct stat found{};
  return stat(path.c_str(), &found) == 0 && S_ISREG(found.st_mode);
}

std::string libnccl_at(const std::string& where) {
  if (where == "system") return kName;
  if (where.empty() || where == "wheel") refuse("where the wheel lies was not told");
  if (is_file(where)) return where.find('/') == std::string::npos ? "./" + where : where;
  for (const char* beneath : {"/", "/lib/", "/lib64/"}) {
    if (is_file(where + beneath + kName)) return where + beneath + kName;
  }
  refuse(std::string("there is no ") + kName + " in " + where);
}

std::string text_of(int version) {
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

std::unique_ptr<NcclLibrary> load(const std::string& path) {
  void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  if (handle == nullptr) {
    const char* reason = dlerror();
    refuse(reason != nullptr ? reason : "cannot open " + path);
  }
  auto library = std::make_unique<NcclLibrary>();
  const auto find = [&](auto& function, const char* symbol) {
    void* address = dlsym(handle, symbol);
    if (address == nullptr) refuse(path + " has no " + symbol);
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(address);
  };
  find(library->get_version, "ncclGetVersion");
  Dl_info info{};
  const bool known = dladdr(reinterpret_cast<const void*>(library->get_version), &info) != 0;
  library->path = known && info.dli_fname != nullptr ? info.dli_fname : path;
  if (library->get_version(&library->version) != kNcclSuccess) refuse(library->path + " does not tell its version");
  if (library->version < kNcclVersionMin) {
    // Up to 2.8 the code had another form: 2804 for 2.8.4.
    refuse(library->path + " is version " + (library->version < 10000 ? "2.8 or older" : text_of(library->version)) +
           "; " + text_of(kNcclVersionMin) + " or newer is needed");
  }
  find(library->get_unique_id, "ncclGetUniqueId");
  find(library->comm_init_rank_config, "ncclCommInitRankConfig");
  find(library->comm_get_async_error, "ncclCommGetAsyncError");
  find(library->comm_abort, "ncclCommAbort");
  find(library->group_start, "ncclGroupStart");
  find(library->group_end, "ncclGroupEnd");
  find(library->send, "ncclSend");
  find(library->recv, "ncclRecv");
  find(library->get_error_string, "ncclGetErrorString");
  find(library->get_last_error, "ncclGetLastError");
  return library;
}

}  // namespace

std::string NcclLibrary::version_text() const { return text_of(version); }

Error NcclLibrary::error_of(NcclResult result, const char* call, NcclComm comm) const {
  std::string text = std::string(call) + " of NCCL " + version_text() + " failed: " + get_error_string(result);
  const char* detail = get_last_error(comm);
  if (detail != nullptr && *detail != '\0') text += std::string(" (") + detail + ")";
  constexpr NcclResult kInvalidArgument = 4;
  constexpr NcclResult kInvalidUsage = 5;
  if (result == kInvalidUsage) {
    text += "; two processes on one GPU need different values of the environment variable NCCL_HOSTID";
  }
  // These two it says again, whenever it is asked.
  const bool for_good = result == kInvalidArgument || result == kInvalidUsage;
  return Error(for_good ? ErrorCode::kUnsupported : ErrorCode::kRouteFailed, text, {{"nccl_code", result}});
}

void NcclLibrary::require(NcclResult result, const char* call, NcclComm comm) const {
  if (result != kNcclSuccess && result != kNcclInProgress) throw error_of(result, call, comm);
}

const NcclLibrary& load_nccl(const std::string& where) {
  static auto* const mutex = new std::mutex;  // never destroyed: threads may outlive static objects
  static auto* const opened = new std::map<std::string, std::unique_ptr<NcclLibrary>>;
  const std::string path = libnccl_at(where);
  const std::lock_guard lock(*mutex);
  auto& library = (*opened)[path];
  if (library == nullptr) library = load(path);
  return *library;
}

}  // namespace kvpool
