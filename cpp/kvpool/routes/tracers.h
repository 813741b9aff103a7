// Allows other processes to access this one as a debugger does.
#pragma once

namespace kvpool {

// Lets every process of the same user trace this one: write its memory (cma), take its descriptors (ucx). Under Yama
// (ptrace_scope 1) a process must name one tracer, or allow all; this allows all, until the process ends. True if that
// is so now, or the kernel has no Yama.
bool allow_tracers() noexcept;

}  // namespace kvpool
