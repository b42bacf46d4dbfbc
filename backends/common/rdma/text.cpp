#include <arpa/inet.h>
#include <sys/resource.h>

#include <cerrno>
#include <cmath>
#include <cstring>

#include "common/errors.hpp"
#include "common/rdma/state.hpp"

namespace epcomm::common::rdma {
namespace {

std::string limit_text(rlim_t limit) {
  return limit == RLIM_INFINITY ? "unlimited" : std::to_string(limit) + " bytes";
}

// Pinned memory counts against a limit that is tiny by default.
std::string locked_memory_text(uint64_t pinned) {
  rlimit limit{};
  getrlimit(RLIMIT_MEMLOCK, &limit);
  std::string text = "the locked-memory limit (RLIMIT_MEMLOCK) of this process is " +
                     limit_text(limit.rlim_cur) + ", at most " + limit_text(limit.rlim_max);
  if (pinned) text += "; this rank registers " + std::to_string(pinned) + " bytes in all";
  if (limit.rlim_cur == RLIM_INFINITY) return text + "; memory or the device's own tables ran out";
  return text +
         "; raise it: `ulimit -l unlimited`, `* - memlock unlimited` in "
         "/etc/security/limits.conf, LimitMEMLOCK=infinity of a systemd unit, "
         "--ulimit memlock=-1 of a container";
}

std::string remedy(int sys_errno, uint64_t pinned) {
  switch (sys_errno) {
    case ENOMEM:
    case EAGAIN:
      return locked_memory_text(pinned);
    case EACCES:
    case EPERM:
    case ENOENT:
    case ENXIO:
      return "this user may not use the device: check /dev/infiniband/uverbs* and the "
             "container's --device=/dev/infiniband";
    case ENODEV:
      return "no such device here: see `python -m epcomm info`";
    case ENETUNREACH:
    case EHOSTUNREACH:
    case ETIMEDOUT:
      return "there is no way to that address: are both ports in one network, and is the GID of "
             "the wanted kind (EPCOMM_IB_GID_INDEX, EPCOMM_IB_ADDR_FAMILY, EPCOMM_IB_ROCE_VERSION, "
             "EPCOMM_IB_HCA)?";
    default:
      return "";
  }
}

}  // namespace

Status verbs_error(int peer, int sys_errno, const std::string& call, const std::string& device,
                   int port, const std::string& detail, uint64_t pinned) {
  std::string text = call + " on " + device;
  if (port) text += " port " + std::to_string(port);
  if (!detail.empty()) text += " (" + detail + ")";
  text += ": " + errno_text(sys_errno) + " (errno " + std::to_string(sys_errno) + ")";
  const std::string advice = remedy(sys_errno, pinned);
  if (!advice.empty()) text += "; " + advice;
  const bool memory = sys_errno == ENOMEM || sys_errno == EAGAIN;
  Status status = error(memory ? Code::kOutOfMemory : Code::kSystem, peer, "%s", text.c_str());
  status.sys_errno = sys_errno;
  return status;
}

std::string gid_text(const ibv_gid& gid) {
  char buffer[INET6_ADDRSTRLEN];
  return inet_ntop(AF_INET6, gid.raw, buffer, sizeof buffer) ? buffer : "?";
}

const char* link_text(uint8_t link_layer) {
  switch (link_layer) {
    case IBV_LINK_LAYER_ETHERNET:
      return "Ethernet";
    case IBV_LINK_LAYER_INFINIBAND:
      return "InfiniBand";
    default:
      return "unspecified";
  }
}

const char* port_state_text(ibv_port_state state) {
  switch (state) {
    case IBV_PORT_DOWN:
      return "down";
    case IBV_PORT_INIT:
      return "initialising (is there a subnet manager?)";
    case IBV_PORT_ARMED:
      return "armed";
    case IBV_PORT_ACTIVE:
      return "active";
    case IBV_PORT_ACTIVE_DEFER:
      return "active, deferred";
    default:
      return "unknown";
  }
}

int mtu_bytes(ibv_mtu mtu) { return mtu >= IBV_MTU_256 && mtu <= IBV_MTU_4096 ? 128 << mtu : 0; }

ibv_mtu mtu_code(int bytes) {
  int code = IBV_MTU_256;
  while (code < IBV_MTU_4096 && 128 << (code + 1) <= bytes) ++code;
  return static_cast<ibv_mtu>(code);
}

uint32_t power_of_two_below(uint64_t value) {
  if (value == 0) return 0;
  uint64_t power = 1;
  while (power * 2 <= value && power < (uint64_t(1) << 31)) power *= 2;
  return static_cast<uint32_t>(power);
}

double timer_seconds(int timer) { return 4.096e-6 * std::ldexp(1.0, timer); }

// One second at the least: slower answers than that are not lost packets, on software devices and
// busy machines either. All attempts together take an eighth of the deadline if that allows more
// than the least, and never more than the deadline; two attempts are made in any case. Never seven
// retries: to Soft-RoCE that means without end, and a lost peer would be seen at the deadline only.
Timers timers_of(double timeout_s) {
  constexpr int kShortest = 18, kLongest = 20, kMostRetries = 6;
  int timer = kShortest;
  while (timer < kLongest && (kMostRetries + 1) * timer_seconds(timer + 1) <= timeout_s / 8) {
    ++timer;
  }
  int retries = kMostRetries;
  while (retries > 1 && (retries + 1) * timer_seconds(timer) > timeout_s) --retries;
  return {timer, retries};
}

}  // namespace epcomm::common::rdma
