#include "nvlink/reach.hpp"

#include <algorithm>
#include <cinttypes>
#include <map>

namespace epcomm::nvlink {
namespace {

constexpr int kInfoVersion = 2;
constexpr char kNothing[] = "-";

const char* share_name(Share share) {
  switch (share) {
    case Share::kFd:
      return "fd";
    case Share::kFabric:
      return "fabric";
    case Share::kIpc:
      return "ipc";
    default:
      return "auto";
  }
}

// The devices that this process sees, by UUID.
Status visible(const common::Driver& driver, std::map<std::string, common::CuDevice>* out) {
  int count = 0;
  EPCOMM_RETURN_IF_ERROR(driver.check(driver.cuDeviceGetCount(&count), "cuDeviceGetCount"));
  for (int index = 0; index < count; ++index) {
    common::CuDevice device;
    std::string uuid;
    EPCOMM_RETURN_IF_ERROR(driver.check(driver.cuDeviceGet(&device, index), "cuDeviceGet"));
    EPCOMM_RETURN_IF_ERROR(device_uuid(driver, device, &uuid));
    (*out)[uuid] = device;
  }
  return {};
}

bool holds(const std::vector<std::string>& blocked, const std::string& uuid) {
  return std::find(blocked.begin(), blocked.end(), uuid.substr(0, kUuidPrefix)) != blocked.end();
}

}  // namespace

std::vector<std::pair<int, int>> missing_pairs(
    const std::vector<std::string>& uuids, const std::vector<std::vector<std::string>>& blocked) {
  std::vector<std::pair<int, int>> missing;
  for (size_t a = 0; a < uuids.size(); ++a) {
    for (size_t b = a + 1; b < uuids.size(); ++b) {
      if (uuids[a] == uuids[b]) continue;  // a GPU reaches itself, whatever the driver says
      if (holds(blocked[a], uuids[b]) || holds(blocked[b], uuids[a])) {
        missing.emplace_back(int(a), int(b));
      }
    }
  }
  return missing;
}

Status blocked_peers(const Gpu& gpu, std::vector<std::string>* out) {
  const common::Driver& driver = gpu.driver();
  std::map<std::string, common::CuDevice> devices;
  EPCOMM_RETURN_IF_ERROR(visible(driver, &devices));
  for (const auto& [uuid, device] : devices) {
    if (uuid == gpu.uuid()) continue;
    int can = 0;
    EPCOMM_RETURN_IF_ERROR(driver.check(driver.cuDeviceCanAccessPeer(&can, gpu.device(), device),
                                        "cuDeviceCanAccessPeer"));
    if (!can) out->push_back(uuid.substr(0, kUuidPrefix));
  }
  return {};
}

Status all_atomics(const Gpu& gpu, const std::vector<PeerFacts>& facts, bool* out) {
  const common::Driver& driver = gpu.driver();
  std::map<std::string, common::CuDevice> devices;
  EPCOMM_RETURN_IF_ERROR(visible(driver, &devices));
  *out = true;
  for (const PeerFacts& peer : facts) {
    if (peer.uuid == gpu.uuid()) continue;
    const auto found = devices.find(peer.uuid);
    int native = 0;
    if (found != devices.end()) {
      EPCOMM_RETURN_IF_ERROR(
          driver.check(driver.cuDeviceGetP2PAttribute(&native, common::kCuPeerNativeAtomics,
                                                      gpu.device(), found->second),
                       "cuDeviceGetP2PAttribute"));
    }
    *out &= native != 0;
  }
  return {};
}

Status encode_facts(const PeerFacts& own, const common::FdExchange& exchange, std::string* out) {
  std::string blocked;
  for (const std::string& uuid : own.blocked) blocked += (blocked.empty() ? "" : ",") + uuid;
  common::Info info;
  exchange.describe(&info);
  info.set("pid", uint64_t(getpid()));
  info.set("gpu", own.uuid);
  info.set("blocked", blocked.empty() ? kNothing : blocked);
  info.set("mps", uint64_t(own.mps));
  info.set("share", uint64_t(own.ticket.share));
  info.set("handle", own.ticket.handle.empty() ? kNothing : own.ticket.handle);
  info.set("heap", own.ticket.heap_bytes);
  info.set("mapped", own.ticket.mapped_bytes);
  info.set("address", own.ticket.address);
  info.set("nonce", own.ticket.nonce);
  return info.encode(kName, kInfoVersion, out);
}

Status decode_facts(const std::string& bytes, int peer, PeerFacts* out) {
  common::Info info;
  std::string blocked;
  uint64_t share, mps;
  EPCOMM_RETURN_IF_ERROR(common::Info::decode(bytes, peer, kName, kInfoVersion, &info));
  EPCOMM_RETURN_IF_ERROR(common::FdExchange::parse(info, peer, &out->address));
  EPCOMM_RETURN_IF_ERROR(info.get(peer, "gpu", &out->uuid));
  EPCOMM_RETURN_IF_ERROR(info.get(peer, "blocked", &blocked));
  EPCOMM_RETURN_IF_ERROR(info.get(peer, "mps", &mps));
  EPCOMM_RETURN_IF_ERROR(info.get(peer, "share", &share));
  EPCOMM_RETURN_IF_ERROR(info.get(peer, "handle", &out->ticket.handle));
  EPCOMM_RETURN_IF_ERROR(info.get(peer, "heap", &out->ticket.heap_bytes));
  EPCOMM_RETURN_IF_ERROR(info.get(peer, "mapped", &out->ticket.mapped_bytes));
  EPCOMM_RETURN_IF_ERROR(info.get(peer, "address", &out->ticket.address));
  EPCOMM_RETURN_IF_ERROR(info.get(peer, "nonce", &out->ticket.nonce));
  if (share < uint64_t(Share::kFd) || share > uint64_t(Share::kIpc)) {
    return error(Code::kUnavailable, peer, "rank %d's information: `share` is %" PRIu64, peer,
                 share);
  }
  out->ticket.share = Share(share);
  out->mps = mps != 0;
  const uint64_t heap = out->ticket.heap_bytes, mapped = out->ticket.mapped_bytes;
  if (mapped < Memory::kTailBytes || heap > mapped - Memory::kTailBytes) {
    return error(Code::kUnavailable, peer,
                 "rank %d's information: a heap of %" PRIu64 " bytes in %" PRIu64 " mapped bytes",
                 peer, heap, mapped);
  }
  for (size_t at = 0; blocked != kNothing && at < blocked.size(); at += kUuidPrefix + 1) {
    out->blocked.push_back(blocked.substr(at, kUuidPrefix));
  }
  return {};
}

Status check_facts(const std::vector<PeerFacts>& facts) {
  std::vector<std::string> uuids;
  std::vector<std::vector<std::string>> blocked;
  for (size_t rank = 0; rank < facts.size(); ++rank) {
    const Ticket& first = facts[0].ticket;
    const Ticket& ticket = facts[rank].ticket;
    if (ticket.heap_bytes != first.heap_bytes) {
      return error(Code::kInvalidArgument, int(rank),
                   "heaps differ: rank 0 has %" PRIu64 " bytes, rank %zu has %" PRIu64
                   "; all ranks must use equal sizes",
                   first.heap_bytes, rank, ticket.heap_bytes);
    }
    if (ticket.share != first.share) {
      return error(Code::kUnavailable, int(rank),
                   "rank 0 shares memory by `%s`, rank %zu by `%s`; EPCOMM_NVLINK_SHARE sets one "
                   "way for all",
                   share_name(first.share), rank, share_name(ticket.share));
    }
    if (facts[rank].address.host != facts[0].address.host) {
      return error(Code::kUnavailable, int(rank),
                   "ranks 0 and %zu do not share memory: they run on different hosts", rank);
    }
    uuids.push_back(facts[rank].uuid);
    blocked.push_back(facts[rank].blocked);
  }
  const auto missing = missing_pairs(uuids, blocked);
  if (missing.empty()) return {};
  std::string names;
  for (size_t i = 0; i < missing.size() && i < 16; ++i) {
    const auto [a, b] = missing[i];
    names += (i ? ", " : "") + std::to_string(a) + "-" + std::to_string(b);
  }
  if (missing.size() > 16) names += ", ...";
  const auto [a, b] = missing[0];
  return error(Code::kUnavailable, b,
               "no peer access between the GPUs of %zu pair%s of ranks: %s (GPU-%.8s and GPU-%.8s "
               "of ranks %d and %d: neither NVLink nor PCIe peer-to-peer; see `nvidia-smi topo "
               "-p2p r`)",
               missing.size(), missing.size() == 1 ? "" : "s", names.c_str(),
               uuids[size_t(a)].c_str(), uuids[size_t(b)].c_str(), a, b);
}

}  // namespace epcomm::nvlink
