// Who may reach into this process as a debugger does.
#pragma once

namespace kvpool {

// Lets every process of the same user trace this one: write its memory (cma), take its descriptors (ucx). Under Yama
// (ptrace_scope 1) a process has to name who may, and it can name one or all. It stays so until the process ends. True
// when that is so now, or the kernel has no Yama.
bool allow_tracers() noexcept;

}  // namespace kvpool
