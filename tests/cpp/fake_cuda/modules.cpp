// Modules and kernels of the fake driver: what is launched is a function of the test's (fake_cuda_kernel), which runs
// in the stream. A cubin is text (fake_cubin.h).
#include <cstring>
#include <functional>
#include <sstream>
#include <utility>

#include "../fake_cubin.h"
#include "state.h"

namespace kvpool::fake_cuda {
namespace {

constexpr unsigned kUsualShared = 48U << 10;
constexpr unsigned kGridX = 0x7fffffff;
constexpr unsigned kGridYZ = 65535;
constexpr unsigned kBlockThreads = 1024;

struct Function {
  std::string name;
  unsigned threads = 0;
  std::vector<FakeParameter> parameters;
  unsigned shared_max = kUsualShared;
  int module = 0;
  bool loaded = false;
};

struct Module {
  Context* context;
  std::map<std::string, std::uintptr_t> functions;
};

// By handle, under the lock; none is given twice. Never destroyed, as state().
auto& modules = *new std::map<std::uintptr_t, Module>;
auto& functions = *new std::map<std::uintptr_t, Function>;
auto& bodies = *new std::map<std::string, KernelBody>;

std::uintptr_t number_of(void* handle) { return reinterpret_cast<std::uintptr_t>(handle); }

std::uintptr_t next_handle() { return state().next_object += 16; }

Function& function_of(const char* call, void* handle) {
  const auto found = functions.find(number_of(handle));
  if (found == functions.end()) undefined(call, "the function is of a module that was unloaded, or of none");
  return found->second;
}

// The parameters as a launch passes them: as many bytes as the code says, from where each pointer points to.
std::vector<std::byte> read_parameters(const Function& function, void** arguments) {
  std::vector<std::byte> read;
  for (const FakeParameter& parameter : function.parameters) {
    const void* from = *arguments++;
    if (from == nullptr) undefined("cuLaunchKernel", "an argument is missing");
    while (read.size() % parameter.bytes != 0) read.push_back(std::byte{0});
    const std::size_t at = read.size();
    read.resize(at + parameter.bytes);
    std::memcpy(&read[at], from, parameter.bytes);
    std::uint64_t value = 0;
    std::memcpy(&value, &read[at], parameter.bytes);
    if (parameter.aligned && value % 16 != 0) {
      undefined("cuLaunchKernel", function.name + " was compiled for arguments that are multiples of 16");
    }
  }
  return read;
}

bool reach(void* context, std::uint64_t address, std::size_t bytes, std::byte** host) {
  const std::lock_guard lock(state().mutex);
  *host = on_device(address) ? host_address(address, bytes, static_cast<Context*>(context)->device) : nullptr;
  return *host != nullptr;
}

}  // namespace

std::size_t modules_left() { return modules.size(); }

void forget_modules() {
  modules.clear();
  functions.clear();
  bodies.clear();
}

extern "C" {

int cuModuleLoadData(void** handle, const void* image) {
  std::unique_lock lock(state().mutex);
  int code = 0;
  Context* context = enter_context("cuModuleLoadData", "", code);
  if (context == nullptr) return code;
  std::istringstream text(static_cast<const char*>(image));
  std::string word;
  std::string magic;
  if (!(text >> magic) || magic != kFakeCubinMagic) return 200;  // INVALID_IMAGE
  int target = 0;
  text >> word >> target;
  if (target != state().settings.at("compute_capability")) return 209;  // NO_BINARY_FOR_GPU
  Module module{context, {}};
  Function function;
  text >> word >> function.name >> word >> function.threads;
  for (std::string parameter; text >> parameter;) {
    function.parameters.push_back({static_cast<std::size_t>(parameter[0] - '0'), parameter.size() > 1});
  }
  ++state().counts["modules loaded"];
  wait_for_device(lock, context->device);
  const std::uintptr_t made = next_handle();
  function.module = static_cast<int>(made);
  const std::uintptr_t number = next_handle();
  module.functions[function.name] = number;
  functions[number] = std::move(function);
  modules.emplace(made, std::move(module));
  *handle = reinterpret_cast<void*>(made);  // NOLINT(performance-no-int-to-ptr)
  return kSuccess;
}

int cuModuleUnload(void* handle) {
  std::unique_lock lock(state().mutex);
  int code = 0;
  Context* context = enter_context("cuModuleUnload", "", code);
  const auto found = modules.find(number_of(handle));
  if (found == modules.end()) undefined("cuModuleUnload", "the module was unloaded, or never loaded");
  if (context == nullptr) return code;
  wait_for_device(lock, context->device);
  for (const auto& [name, number] : found->second.functions) functions.erase(number);
  modules.erase(found);
  return kSuccess;
}

int cuModuleGetFunction(void** function, void* module, const char* name) {
  const std::lock_guard lock(state().mutex);
  int code = 0;
  if (enter_context("cuModuleGetFunction", name, code) == nullptr) return code;
  const auto found = modules.find(number_of(module));
  if (found == modules.end()) undefined("cuModuleGetFunction", "the module was unloaded, or never loaded");
  const auto named = found->second.functions.find(name);
  if (named == found->second.functions.end()) return 500;  // NOT_FOUND
  *function = reinterpret_cast<void*>(named->second);      // NOLINT(performance-no-int-to-ptr)
  return kSuccess;
}

int cuFuncSetAttribute(void* handle, int attribute, int value) {
  const std::lock_guard lock(state().mutex);
  int code = 0;
  if (enter_context("cuFuncSetAttribute", std::to_string(attribute), code) == nullptr) return code;
  Function& function = function_of("cuFuncSetAttribute", handle);
  if (attribute != 8 || value < 0 || value > state().settings.at("shared_optin")) return kInvalidValue;
  function.shared_max = static_cast<unsigned>(value);
  return kSuccess;
}

// Until then, the first launch loads the kernel, when all work of the GPU has ended.
int cuFuncLoad(void* handle) {
  std::unique_lock lock(state().mutex);
  int code = 0;
  Context* context = enter_context("cuFuncLoad", "", code);
  if (context == nullptr) return code;
  function_of("cuFuncLoad", handle).loaded = true;
  wait_for_device(lock, context->device);
  return kSuccess;
}

int cuLaunchKernel(void* handle, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
                   unsigned block_z, unsigned shared, void* stream_handle, void** arguments, void** extra) {
  std::unique_lock lock(state().mutex);
  int code = 0;
  Stream* stream = enter_stream("cuLaunchKernel", "", stream_handle, code);
  if (stream == nullptr) return code;
  Function& function = function_of("cuLaunchKernel", handle);
  if (arguments == nullptr || extra != nullptr) return kInvalidValue;
  const bool grid =
      grid_x > 0 && grid_x <= kGridX && grid_y > 0 && grid_y <= kGridYZ && grid_z > 0 && grid_z <= kGridYZ;
  const std::uint64_t threads = std::uint64_t{block_x} * block_y * block_z;
  if (!grid || threads == 0 || threads > kBlockThreads) return kInvalidValue;
  if (block_x != function.threads || block_y != 1 || block_z != 1) return kInvalidValue;  // .reqntid
  if (shared > function.shared_max) return kInvalidValue;
  const auto found = modules.find(static_cast<std::uintptr_t>(function.module));
  if (found->second.context != stream->context) return kInvalidHandle;
  if (!function.loaded) {
    ++state().counts["loaded at a launch"];
    function.loaded = true;
    wait_for_device(lock, stream->context->device);
  }
  const auto body = bodies.find(function.name);
  if (body == bodies.end()) undefined("cuLaunchKernel", "no test says what " + function.name + " does");
  FakeLaunch launch;
  launch.parameters = read_parameters(function, arguments);
  launch.grid[0] = grid_x;
  launch.grid[1] = grid_y;
  launch.grid[2] = grid_z;
  launch.reach = reach;
  launch.context = stream->context;
  if (stream->captured) return kSuccess;
  stream->add([run = body->second, launch = std::move(launch), context = stream->context] {
    {
      const std::lock_guard inner(state().mutex);
      if (context->lost != 0) return;
    }
    const int fault = run(launch);
    if (fault == 0) return;
    const std::lock_guard inner(state().mutex);
    if (context->lost == 0) context->lost = fault;
  });
  return kSuccess;
}

void fake_cuda_kernel(const char* name, const KernelBody& body) {
  const std::lock_guard lock(state().mutex);
  bodies[name] = body;
}

}  // extern "C"

}  // namespace kvpool::fake_cuda
