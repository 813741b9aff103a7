#include "kvpool/routes/ucx/ucx_library.h"

#include <dlfcn.h>
#include <link.h>
#include <sys/stat.h>

#include <array>
#include <cstring>
#include <memory>
#include <mutex>

namespace kvpool {
namespace {

constexpr const char* kAdvice =
    "; install one of the extras kvpool[ucx], kvpool[cuda12] and kvpool[cuda13] for the wheel's, or a system package "
    "(libucx0, ucx) of 1.13 or newer and choose it with KVPOOL_UCX=system, or its folder with KVPOOL_UCX=PATH";
constexpr unsigned kMinorMin = 13;

[[noreturn]] void refuse(const std::string& why) { throw Error(ErrorCode::kUnsupported, "no UCX: " + why + kAdvice); }

bool is_file(const std::string& path) {
  struct stat found{};
  return stat(path.c_str(), &found) == 0 && S_ISREG(found.st_mode);
}

std::string folder_of(const std::string& path) {
  const auto slash = path.rfind('/');
  return slash == std::string::npos ? "." : path.substr(0, slash);
}

// The libucs.so.0 that is already loaded in this process, by any library; empty if not loaded. Copies under other names
// (NIXL's wheel carries a renamed one) are no matter: they share nothing with ours.
std::string loaded_ucs() {
  std::string path;
  dl_iterate_phdr(
      [](dl_phdr_info* object, std::size_t, void* found) {
        const char* slash = std::strrchr(object->dlpi_name, '/');
        const char* name = slash != nullptr ? slash + 1 : object->dlpi_name;
        constexpr const char* kSoname = "libucs.so";
        const std::size_t n = std::strlen(kSoname);
        if (std::strncmp(name, kSoname, n) != 0 || (name[n] != '\0' && name[n] != '.')) return 0;
        *static_cast<std::string*>(found) = object->dlpi_name;
        return 1;
      },
      &path);
  return path;
}

// The path of libucp, or a bare name for the loader to look up.
std::string libucp_at(const std::string& where) {
  if (where == "system") return "libucp.so.0";
  if (where.empty() || where == "wheel") refuse("where the wheel lies was not told");
  if (is_file(where)) return where.find('/') == std::string::npos ? "./" + where : where;
  for (const char* beneath : {"/libucp.so.0", "/lib/libucp.so.0", "/lib64/libucp.so.0"}) {
    if (is_file(where + beneath)) return where + beneath;
  }
  refuse("there is no libucp.so.0 in " + where);
}

void* open(const std::string& path) {
  void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  if (handle == nullptr) {
    const char* reason = dlerror();
    refuse(reason != nullptr ? reason : "cannot open " + path);
  }
  return handle;
}

// Where the loader found the library that has this symbol.
std::string path_of(const void* symbol, const std::string& otherwise) {
  Dl_info info{};
  return dladdr(symbol, &info) != 0 && info.dli_fname != nullptr ? info.dli_fname : otherwise;
}

std::unique_ptr<UcxLibrary> load(const std::string& where) {
  auto library = std::make_unique<UcxLibrary>();
  std::string path;
  const std::string other = loaded_ucs();
  if (!other.empty()) {
    path = folder_of(other) + "/libucp.so.0";
    library->shared = true;
    if (!is_file(path)) {
      refuse("this process has opened " + other + " already, which has no libucp.so.0 beside it, and a second copy " +
             "under the same name does not work");
    }
  } else {
    path = libucp_at(where);
  }
  // From the bottom up, so that each finds those below it opened already, and not by another search path. libucm comes
  // with libucs: the two need each other.
  if (path.find('/') != std::string::npos) {
    for (const char* below : {"/libucs.so.0", "/libuct.so.0"}) {
      if (is_file(folder_of(path) + below)) open(folder_of(path) + below);
    }
  }
  void* handle = open(path);
  const auto find = [&](auto& function, const char* symbol) {
    void* address = dlsym(handle, symbol);  // in libucp and in what it needs
    if (address == nullptr) refuse(path + " has no " + symbol);
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(address);
  };
  find(library->get_version, "ucp_get_version");
  find(library->get_version_string, "ucp_get_version_string");
  library->path = path_of(reinterpret_cast<const void*>(library->get_version), path);
  library->version = library->get_version_string();
  unsigned major = 0;
  unsigned release = 0;
  library->get_version(&major, &library->minor, &release);
  if (major != 1 || library->minor < kMinorMin) {
    refuse(library->path + " is version " + library->version + "; 1." + std::to_string(kMinorMin) +
           " or newer is needed" + (library->shared ? ", and another part of this process has opened it already" : ""));
  }
  find(library->config_read, "ucp_config_read");
  find(library->config_modify, "ucp_config_modify");
  find(library->config_release, "ucp_config_release");
  find(library->init_version, "ucp_init_version");
  find(library->cleanup, "ucp_cleanup");
  find(library->context_query, "ucp_context_query");
  find(library->mem_map, "ucp_mem_map");
  find(library->mem_unmap, "ucp_mem_unmap");
  find(library->rkey_pack, "ucp_rkey_pack");
  find(library->rkey_buffer_release, "ucp_rkey_buffer_release");
  find(library->worker_create, "ucp_worker_create");
  find(library->worker_destroy, "ucp_worker_destroy");
  find(library->worker_get_address, "ucp_worker_get_address");
  find(library->worker_release_address, "ucp_worker_release_address");
  find(library->worker_get_efd, "ucp_worker_get_efd");
  find(library->worker_arm, "ucp_worker_arm");
  find(library->worker_progress, "ucp_worker_progress");
  find(library->ep_create, "ucp_ep_create");
  find(library->ep_close_nbx, "ucp_ep_close_nbx");
  find(library->ep_flush_nbx, "ucp_ep_flush_nbx");
  find(library->ep_print_info, "ucp_ep_print_info");
  find(library->ep_rkey_unpack, "ucp_ep_rkey_unpack");
  find(library->rkey_destroy, "ucp_rkey_destroy");
  find(library->put_nbx, "ucp_put_nbx");
  find(library->request_free, "ucp_request_free");
  find(library->status_string, "ucs_status_string");
  return library;
}

}  // namespace

void UcxLibrary::require(ucs_status_t status, const char* call, ErrorCode code) const {
  if (status == UCS_OK) return;
  throw Error(code, std::string(call) + " of UCX " + version + " failed: " + status_string(status));
}

const UcxLibrary& load_ucx(const std::string& where) {
  static std::mutex mutex;
  static const UcxLibrary* opened = nullptr;
  const std::scoped_lock lock(mutex);
  if (opened == nullptr) opened = load(where).release();
  return *opened;
}

}  // namespace kvpool
