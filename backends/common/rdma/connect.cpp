// What needs the peers: telling them, reaching them, and the plan that comes of it.
#include <algorithm>
#include <cstring>
#include <sstream>

#include "common/clock.hpp"
#include "common/errors.hpp"
#include "common/rdma/rdma.hpp"
#include "common/rdma/state.hpp"

namespace epcomm::common {
namespace rdma {
namespace {

constexpr int kRnrTimer = 12;  // 0.64 ms; nothing here can be "not ready", but retries end
constexpr int kRnrRetries = 6;
constexpr int kHopLimit = 64;
constexpr int kMostAtomics = 128;

// One path as a peer tells it.
struct RemotePath {
  std::string device;
  int port = 0;
  int link_layer = 0;
  uint16_t lid = 0;
  ibv_gid gid{};
  int gid_index = -1;
  int mtu = 0;
  int max_rd_atomic = 0;  // requests it answers at a time
  bool atomics = false;
  uint32_t data_rkey = 0;
  uint32_t signal_rkey = 0;
};

struct Remote {
  int num_ranks = 0;
  int num_channels = 0;
  uint32_t psn = 0;
  uint64_t heap = 0;
  uint64_t heap_bytes = 0;
  std::vector<RemotePath> paths;
  std::vector<uint32_t> numbers;  // of its queue pairs to this rank, by channel
};

std::string path_key(size_t index) { return "rdma.path." + std::to_string(index); }
std::string numbers_key(int peer) { return "rdma.qps." + std::to_string(peer); }

std::string gid_hex(const ibv_gid& gid) {
  Key key{};
  std::memcpy(key.data(), gid.raw, key.size());
  return to_hex(key);
}

bool parse(const std::string& text, RemotePath* out) {
  std::istringstream in(text);
  std::string gid;
  int atomics = 0;
  in >> out->device >> out->port >> out->link_layer >> out->lid >> gid >> out->gid_index >>
      out->mtu >> out->max_rd_atomic >> atomics >> out->data_rkey >> out->signal_rkey;
  Key key{};
  if (in.fail() || !from_hex(gid, &key) || mtu_bytes(mtu_code(out->mtu)) != out->mtu) return false;
  std::memcpy(out->gid.raw, key.data(), key.size());
  out->atomics = atomics != 0;
  return true;
}

Status read_remote(const State& state, int peer, const Info& info, Remote* out) {
  const auto damaged = [&](const std::string& key) {
    return error(Code::kUnavailable, peer, "rank %d's information: `%s` is damaged", peer,
                 key.c_str());
  };
  std::string text, provider;
  size_t num_paths = 0;
  EPCOMM_RETURN_IF_ERROR(info.get(peer, "rdma.shape", &text));
  std::istringstream shape(text);
  shape >> provider >> out->num_ranks >> out->num_channels >> num_paths >> out->psn;
  if (shape.fail() || num_paths < 1 || num_paths > 256) return damaged("rdma.shape");
  const RdmaOptions& options = state.options;
  if (provider != state.provider().name()) {
    return error(Code::kUnavailable, peer,
                 "rank %d drives `%s` devices, rank %d `%s` (EPCOMM_IB_PROVIDER)", peer,
                 provider.c_str(), state.rank, state.provider().name());
  }
  if (out->num_ranks != options.num_ranks || out->num_channels != options.num_channels) {
    return error(Code::kUnavailable, peer,
                 "rank %d planned for %d ranks and %d channels, rank %d for %d and %d "
                 "(num_channels, EPCOMM_IB_FAILOVER)",
                 peer, out->num_ranks, out->num_channels, state.rank, options.num_ranks,
                 options.num_channels);
  }
  EPCOMM_RETURN_IF_ERROR(info.get(peer, "rdma.heap", &text));
  std::istringstream heap(text);
  heap >> out->heap >> out->heap_bytes;
  // A provider without a wire is told that so many bytes are mapped here.
  if (heap.fail() || out->heap_bytes != state.heap_bytes) return damaged("rdma.heap");
  out->paths.resize(num_paths);
  for (size_t i = 0; i < num_paths; ++i) {
    EPCOMM_RETURN_IF_ERROR(info.get(peer, path_key(i).c_str(), &text));
    if (!parse(text, &out->paths[i])) return damaged(path_key(i));
  }
  EPCOMM_RETURN_IF_ERROR(info.get(peer, numbers_key(state.rank).c_str(), &text));
  std::istringstream numbers(text);
  out->numbers.resize(size_t(options.num_channels) + 1);
  for (uint32_t& number : out->numbers) numbers >> number;
  if (numbers.fail()) return damaged(numbers_key(state.rank));
  return {};
}

bool is_ipv4(const ibv_gid& gid) {
  constexpr uint8_t kMapped[12] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};
  return std::memcmp(gid.raw, kMapped, sizeof kMapped) == 0;
}

// RoCE v2 ports hash the flow label into the UDP source port, 0xC000 | the lowest 14 bits where the
// others are 0, and switches hash that into a route. So the queue pairs of one rank to one peer get
// different ones for sure, and those of different pairs of ranks start anywhere. Never 0: drivers
// then choose for themselves.
uint32_t flow_label(int rank, int peer, int channel) {
  uint32_t hash = uint32_t(rank) * 0x9e3779b1u ^ uint32_t(peer) * 0x85ebca6bu;
  hash ^= hash >> 15;
  hash *= 0x2c1b3c6du;
  hash ^= hash >> 13;
  return 1 + (hash + uint32_t(channel) * 37) % 0x3fff;
}

Status connect_queue(State& state, int number, const Remote& remote) {
  RdmaQueue& queue = state.queues[size_t(number)];
  Link& link = state.links[size_t(number)];
  Path& path = state.paths[size_t(queue.path)];
  const Device& device = state.device_of(path);
  const RdmaPath& asked = path.asked;
  const PlanRow row =
      plan_row(state.shape(), queue.peer, queue.channel, int32_t(remote.paths.size()));
  const RemotePath& there = remote.paths[size_t(row.remote_path)];
  link.device = there.device;
  link.port = there.port;
  link.lid = there.lid;
  link.gid = there.gid;
  link.mtu = std::min(path.mtu, there.mtu);
  link.flow_label = flow_label(state.rank, queue.peer, queue.channel);
  queue.remote_path = row.remote_path;
  queue.remote_qpn = remote.numbers[size_t(queue.channel)];
  queue.remote_heap = remote.heap;
  queue.data_rkey = there.data_rkey;
  queue.signal_rkey = there.signal_rkey;
  queue.lkey = device.data->lkey;
  const std::string whither = "peer " + std::to_string(queue.peer) + ", channel " +
                              std::to_string(queue.channel) + ", from GID " + gid_text(path.gid) +
                              " to " + there.device + " port " + std::to_string(there.port) +
                              " GID " + gid_text(there.gid);
  if (queue.remote_qpn == 0) {
    return error(Code::kUnavailable, queue.peer, "rank %d made no queue pair for rank %d",
                 queue.peer, state.rank);
  }
  if (there.link_layer != path.port.link_layer) {
    return error(Code::kUnavailable, queue.peer,
                 "%s port %d is %s, but %s port %d of rank %d is %s: name ports that can meet with "
                 "EPCOMM_IB_HCA",
                 device.name.c_str(), asked.port, link_text(path.port.link_layer),
                 there.device.c_str(), there.port, queue.peer,
                 link_text(uint8_t(there.link_layer)));
  }
  if (path.ethernet() && is_ipv4(path.gid) != is_ipv4(there.gid)) {
    const auto family = [](const ibv_gid& gid) { return is_ipv4(gid) ? "IPv4" : "IPv6"; };
    return error(Code::kUnavailable, queue.peer,
                 "%s port %d has GID %s (%s), but %s port %d of rank %d has GID %s (%s): give both "
                 "interfaces addresses of one family, or name it with EPCOMM_IB_ADDR_FAMILY",
                 device.name.c_str(), asked.port, gid_text(path.gid).c_str(), family(path.gid),
                 there.device.c_str(), there.port, queue.peer, gid_text(there.gid).c_str(),
                 family(there.gid));
  }

  const int answered = std::clamp(device.attr.max_qp_rd_atom, 0, kMostAtomics);
  const int asked_at_a_time =
      std::clamp(std::min(device.attr.max_qp_init_rd_atom, there.max_rd_atomic), 0, kMostAtomics);
  const bool atomics = device.attr.atomic_cap != IBV_ATOMIC_NONE && there.atomics;
  queue.max_rd_atomic = atomics ? uint32_t(asked_at_a_time) : 0;
  queue.max_reads = state.options.remote_reads ? uint32_t(asked_at_a_time) : 0;

  ibv_qp_attr attr{};
  attr.qp_state = IBV_QPS_RTR;
  attr.path_mtu = mtu_code(link.mtu);
  attr.dest_qp_num = queue.remote_qpn;
  attr.rq_psn = remote.psn;
  attr.max_dest_rd_atomic = uint8_t(answered);
  attr.min_rnr_timer = kRnrTimer;
  attr.ah_attr.dlid = there.lid;
  attr.ah_attr.sl = uint8_t(state.options.service_level);
  attr.ah_attr.port_num = uint8_t(asked.port);
  const bool same_subnet = path.gid.global.subnet_prefix == there.gid.global.subnet_prefix;
  if (path.ethernet() || asked.gid_index >= 0 || there.lid == 0 || !same_subnet) {
    attr.ah_attr.is_global = 1;
    attr.ah_attr.grh.dgid = there.gid;
    attr.ah_attr.grh.sgid_index = uint8_t(std::max(asked.gid_index, 0));
    attr.ah_attr.grh.hop_limit = kHopLimit;
    attr.ah_attr.grh.traffic_class = uint8_t(state.options.traffic_class);
    attr.ah_attr.grh.flow_label = link.flow_label;
  }
  int failed = state.provider().modify_qp(queue.qp, &attr,
                                          IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU |
                                              IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                                              IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
  if (failed) {
    return verbs_error(queue.peer, failed, "ibv_modify_qp to RTR", device.name, asked.port,
                       whither);
  }

  attr = {};
  attr.qp_state = IBV_QPS_RTS;
  attr.timeout = uint8_t(state.timer);
  attr.retry_cnt = uint8_t(state.retries);
  attr.rnr_retry = kRnrRetries;
  attr.sq_psn = state.psn;
  attr.max_rd_atomic = uint8_t(asked_at_a_time);
  failed =
      state.provider().modify_qp(queue.qp, &attr,
                                 IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT |
                                     IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC);
  if (failed) {
    return verbs_error(queue.peer, failed, "ibv_modify_qp to RTS", device.name, asked.port,
                       whither);
  }
  link.connected = true;
  return {};
}

Status attach(State& state, const Remote& remote, std::byte* mapped, int peer) {
  if (!mapped) {
    return error(Code::kUnavailable, peer,
                 "rank %d's memory is not mapped here, and `%s` devices have no wire", peer,
                 state.provider().name());
  }
  for (const Device& device : state.devices) {
    for (const RemotePath& path : remote.paths) {
      for (const uint32_t rkey : {path.data_rkey, path.signal_rkey}) {
        RemoteMemory memory;
        memory.gid = path.gid;
        memory.rkey = rkey;
        memory.address = remote.heap;
        memory.bytes = remote.heap_bytes;
        memory.mapped = mapped;
        // As the peer registered it: its options are the same, but only it knows its device.
        memory.readable = state.options.remote_reads && rkey == path.signal_rkey;
        EPCOMM_RETURN_IF_ERROR(state.provider().attach_remote(device.context, memory));
      }
    }
  }
  return {};
}

}  // namespace
}  // namespace rdma

Status Rdma::describe(Info* info) const noexcept {
  const rdma::State& state = *state_;
  if (!state.heap) return error(Code::kInternal, -1, "describe: no heap is registered");
  return guarded([&]() -> Status {
    const PlanShape shape = state.shape();
    std::ostringstream text;
    text << state.provider().name() << ' ' << shape.num_ranks << ' ' << shape.num_channels << ' '
         << shape.num_paths << ' ' << state.psn;
    info->set("rdma.shape", text.str());
    info->set("rdma.heap", std::to_string(reinterpret_cast<uintptr_t>(state.heap)) + " " +
                               std::to_string(state.heap_bytes));
    for (size_t i = 0; i < state.paths.size(); ++i) {
      const rdma::Path& path = state.paths[i];
      const rdma::Device& device = state.devices[size_t(path.device)];
      std::ostringstream line;
      line << device.name << ' ' << path.asked.port << ' ' << int(path.port.link_layer) << ' '
           << path.port.lid << ' ' << rdma::gid_hex(path.gid) << ' ' << path.asked.gid_index << ' '
           << path.mtu << ' ' << device.attr.max_qp_rd_atom << ' '
           << (device.attr.atomic_cap != IBV_ATOMIC_NONE) << ' ' << device.data->rkey << ' '
           << device.signal->rkey;
      info->set(rdma::path_key(i).c_str(), line.str());
    }
    for (int peer = 0; peer < shape.num_ranks; ++peer) {
      if (peer == state.rank) continue;
      std::string numbers;
      for (int channel = 0; channel <= shape.num_channels; ++channel) {
        const ibv_qp* const qp = state.queues[size_t(plan_index(shape, peer, channel))].qp;
        numbers += (channel ? " " : "") + std::to_string(qp ? qp->qp_num : 0);
      }
      info->set(rdma::numbers_key(peer).c_str(), numbers);
    }
    return {};
  });
}

Status Rdma::connect(int rank, const std::vector<Info>& infos, const std::vector<bool>& wanted,
                     const std::vector<std::byte*>& mapped, double timeout_s) noexcept {
  rdma::State& state = *state_;
  const Status status = guarded([&]() -> Status {
    const int num_ranks = state.options.num_ranks;
    if (!state.heap) return error(Code::kInternal, -1, "connect: no heap is registered");
    if (infos.size() != size_t(num_ranks) || wanted.size() != size_t(num_ranks) || rank < 0 ||
        rank >= num_ranks || (state.rank >= 0 && state.rank != rank)) {
      return error(Code::kInternal, -1, "connect: rank %d, %zu infos, %zu wishes for %d ranks",
                   rank, infos.size(), wanted.size(), num_ranks);
    }
    state.rank = rank;
    // With reads, something follows the last try: another queue pair, which must come in time too.
    const rdma::Timers timers =
        rdma::timers_of(state.options.remote_reads ? timeout_s * 0.7 : timeout_s);
    state.timer = timers.timer;
    state.retries = timers.retries;
    const int64_t end = now_ns() + seconds_to_ns(timeout_s);
    const PlanShape shape = state.shape();
    for (int peer = 0; peer < num_ranks; ++peer) {
      const bool far = peer != rank && wanted[size_t(peer)];
      rdma::Remote remote;
      if (far) {
        EPCOMM_RETURN_IF_ERROR(rdma::read_remote(state, peer, infos[size_t(peer)], &remote));
        if (state.provider().needs_mapping()) {
          std::byte* const at = size_t(peer) < mapped.size() ? mapped[size_t(peer)] : nullptr;
          EPCOMM_RETURN_IF_ERROR(rdma::attach(state, remote, at, peer));
        }
      }
      for (int channel = 0; channel <= shape.num_channels; ++channel) {
        const int number = plan_index(shape, peer, channel);
        if (!far) {
          state.destroy_queue(number);
          continue;
        }
        if (now_ns() > end) {
          return error(Code::kTimeout, peer,
                       "connecting the queue pairs to rank %d took more than %g s", peer,
                       timeout_s);
        }
        EPCOMM_RETURN_IF_ERROR(rdma::connect_queue(state, number, remote));
      }
    }
    return {};
  });
  if (!status.ok()) close();
  return status;
}

namespace {

// JSON by hand: names come from the kernel, the rest are numbers.
class Json {
 public:
  Json& open(char bracket) {
    comma();
    text_ += bracket;
    first_ = true;
    return *this;
  }
  Json& end(char bracket) {
    text_ += bracket;
    first_ = false;
    return *this;
  }
  Json& key(const char* name) {
    comma();
    quote(name);
    text_ += ": ";
    first_ = true;
    return *this;
  }
  Json& value(const std::string& text) {
    comma();
    quote(text);
    return *this;
  }
  Json& value(int64_t number) {
    comma();
    text_ += std::to_string(number);
    return *this;
  }
  Json& null() {
    comma();
    text_ += "null";
    return *this;
  }
  template <class Value>
  Json& field(const char* name, const Value& told) {
    return key(name).value(told);
  }
  const std::string& text() const { return text_; }

 private:
  void comma() {
    if (!first_) text_ += ", ";
    first_ = false;
  }
  void quote(const std::string& text) {
    text_ += '"';
    for (const char c : text) {
      if (c == '"' || c == '\\') text_ += '\\';
      text_ += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
    }
    text_ += '"';
  }

  std::string text_;
  bool first_ = true;
};

}  // namespace

std::string Rdma::plan_json() const {
  const rdma::State& state = *state_;
  Json json;
  json.open('{');
  json.field("provider", state.options.provider ? state.options.provider->name() : "none");
  json.key("retry_timer").value(int64_t(state.timer)).field("retries", int64_t(state.retries));
  json.key("paths").open('[');
  for (const rdma::Path& path : state.paths) {
    json.open('{').field("device", path.asked.device).field("port", int64_t(path.asked.port));
    json.field("link_layer", std::string(rdma::link_text(path.port.link_layer)));
    json.field("lid", int64_t(path.port.lid)).field("gid", rdma::gid_text(path.gid));
    json.field("gid_index", int64_t(path.asked.gid_index)).field("mtu", int64_t(path.mtu));
    json.field("queue_pairs", int64_t(path.num_queues));
    json.field("cq_depth", int64_t(path.cq_depth)).key("reasons").open('[');
    for (const std::string& reason : path.reasons) json.value(reason);
    json.end(']').end('}');
  }
  json.end(']').key("rows").open('[');
  const int asked = state.options.control_channel;
  const int control = asked >= 0 ? asked : state.options.num_channels;
  for (size_t i = 0; i < state.queues.size(); ++i) {
    const RdmaQueue& queue = state.queues[i];
    const rdma::Link& link = state.links[i];
    if (!queue.qp || queue.path < 0) continue;
    const rdma::Path& path = state.paths[size_t(queue.path)];
    json.open('{').field("peer", int64_t(queue.peer)).field("channel", int64_t(queue.channel));
    json.field("kind", std::string(queue.channel > control   ? "spare"
                                   : queue.channel < control ? "data"
                                                             : "control"));
    json.field("path", int64_t(queue.path)).field("device", path.asked.device);
    json.field("port", int64_t(path.asked.port)).field("gid", rdma::gid_text(path.gid));
    json.field("qpn", int64_t(queue.qp->qp_num)).field("depth", int64_t(queue.depth));
    json.field("inline", int64_t(queue.max_inline));
    if (link.connected) {
      json.field("remote_device", link.device).field("remote_port", int64_t(link.port));
      json.field("remote_lid", int64_t(link.lid)).field("remote_gid", rdma::gid_text(link.gid));
      json.field("remote_qpn", int64_t(queue.remote_qpn)).field("mtu", int64_t(link.mtu));
      json.field("max_rd_atomic", int64_t(queue.max_rd_atomic));
      json.field("flow_label", int64_t(link.flow_label));
    }
    json.end('}');
  }
  json.end(']').end('}');
  return json.text();
}

}  // namespace epcomm::common
