#include "host/measure.hpp"

#include <atomic>
#include <chrono>
#include <thread>

namespace epcomm::host {
namespace {

using Clock = std::chrono::steady_clock;

double since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

Status send(HostTransport* transport, const Flow& flow, bool signal) noexcept {
  if (flow.bytes == 0) return transport->signal(flow.peer, flow.channel, flow.word, 1);
  if (!signal) return transport->put(flow.peer, flow.channel, flow.dst, flow.src, flow.bytes);
  return transport->put_signal(flow.peer, flow.channel, flow.dst, flow.src, flow.bytes, flow.word,
                               1);
}

// `transport` may be used by a thread whose WaitSpec must not touch Python.
Status pour(HostTransport* transport, const Flow& flow, bool signal, int64_t count,
            const WaitSpec& spec) noexcept {
  for (int64_t i = 0; i < count; ++i) {
    EPCOMM_RETURN_IF_ERROR(send(transport, flow, signal));
  }
  return transport->quiet(flow.peer, flow.channel, spec);
}

}  // namespace

Status round_trips(HostTransport* transport, const Flow& flow, bool first, uint64_t base,
                   int64_t count, const WaitSpec& spec, double* seconds) noexcept {
  for (int64_t i = 0; i < count; ++i) {
    const Clock::time_point begin = Clock::now();
    if (first) EPCOMM_RETURN_IF_ERROR(send(transport, flow, true));
    EPCOMM_RETURN_IF_ERROR(transport->wait(flow.peer, flow.word, base + uint64_t(i) + 1, spec));
    if (!first) EPCOMM_RETURN_IF_ERROR(send(transport, flow, true));
    seconds[i] = since(begin);
  }
  return transport->quiet(flow.peer, flow.channel, spec);
}

Status completions(HostTransport* transport, const Flow& flow, bool signal, int64_t count,
                   const WaitSpec& spec, double* seconds) noexcept {
  for (int64_t i = 0; i < count; ++i) {
    const Clock::time_point begin = Clock::now();
    EPCOMM_RETURN_IF_ERROR(send(transport, flow, signal));
    EPCOMM_RETURN_IF_ERROR(transport->quiet(flow.peer, flow.channel, spec));
    seconds[i] = since(begin);
  }
  return {};
}

Status stream(HostTransport* transport, const std::vector<Flow>& flows, bool signal, int64_t count,
              const WaitSpec& spec, double* seconds) noexcept {
  *seconds = 0;
  if (flows.empty()) return {};
  WaitSpec native = spec;  // of threads that Python does not know
  native.interrupted = nullptr;
  std::vector<Status> results;
  std::vector<std::thread> threads;
  std::atomic<bool> go{false};
  try {
    results.resize(flows.size());
    threads.reserve(flows.size());
    for (size_t i = 1; i < flows.size(); ++i) {
      threads.emplace_back([&, i] {
        while (!go.load(std::memory_order_acquire)) std::this_thread::yield();
        results[i] = pour(transport, flows[i], signal, count, native);
      });
    }
  } catch (const std::exception& caught) {
    go.store(true, std::memory_order_release);
    for (std::thread& thread : threads) thread.join();
    return error(Code::kOutOfMemory, -1, "no thread for each of %zu flows: %s", flows.size(),
                 caught.what());
  }
  const Clock::time_point begin = Clock::now();
  go.store(true, std::memory_order_release);
  results[0] = pour(transport, flows[0], signal, count, spec);
  for (std::thread& thread : threads) thread.join();
  *seconds = since(begin);
  for (Status& result : results) EPCOMM_RETURN_IF_ERROR(std::move(result));
  return {};
}

}  // namespace epcomm::host
