// Threads of our own: they take no signals and never the GIL.
#pragma once

#include <pthread.h>
#include <signal.h>

namespace epcomm::common {

// What pthread_create() returns. Signals belong to the program's own threads (Python's handlers run
// in its main thread); faults stay deliverable.
inline int start_native_thread(pthread_t* out, void* (*body)(void*), void* arg) noexcept {
  sigset_t all, old;
  sigfillset(&all);
  for (int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT}) sigdelset(&all, fault);
  pthread_sigmask(SIG_SETMASK, &all, &old);
  const int why = pthread_create(out, nullptr, body, arg);
  pthread_sigmask(SIG_SETMASK, &old, nullptr);
  return why;
}

}  // namespace epcomm::common
