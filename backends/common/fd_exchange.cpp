#include "common/fd_exchange.hpp"

#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>

#include "common/clock.hpp"
#include "common/errors.hpp"

namespace epcomm::common {
namespace {

constexpr char kMagic[8] = {'e', 'p', 'c', 'o', 'm', 'm', '/', '1'};
constexpr int64_t kMillisecond = 1000000;
constexpr int64_t kInterruptEvery = 50 * kMillisecond;
constexpr int64_t kRetryEvery = 2 * kMillisecond;
// A stranger that connects and says nothing is dropped after this long.
constexpr int64_t kHelloWithin = 5000 * kMillisecond;

struct Hello {
  char magic[8];
  int32_t rank;
  unsigned char secret[16];
};

enum class Answer : int32_t { kGiven = 0, kWrongSecret = 1 };

struct Reply {
  char magic[8];
  Answer answer;
};

socklen_t abstract_address(const Key& key, sockaddr_un* out) {
  const std::string name = "epcomm-" + to_hex(key);
  *out = {};
  out->sun_family = AF_UNIX;  // sun_path[0] stays 0: no file, gone with its socket
  std::memcpy(out->sun_path + 1, name.data(), name.size());
  return socklen_t(offsetof(sockaddr_un, sun_path) + 1 + name.size());
}

UniqueFd open_socket() {
  return UniqueFd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
}

std::string host_identity() {
  char text[64] = "";
  if (FILE* file = std::fopen("/proc/sys/kernel/random/boot_id", "re")) {
    if (std::fscanf(file, "%63s", text) != 1) text[0] = 0;
    std::fclose(file);
  }
  return *text ? text : "unknown";
}

uint64_t network_namespace() {
  struct stat facts;
  return stat("/proc/self/ns/net", &facts) == 0 ? facts.st_ino : 0;
}

bool same_user(int socket) {
  ucred credentials{};
  socklen_t bytes = sizeof credentials;
  return getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &credentials, &bytes) == 0 &&
         credentials.uid == geteuid();
}

// One message with descriptors; 0 or the error number.
int send_with_fds(int socket, const Reply& reply, const std::vector<int>& fds) {
  alignas(cmsghdr) char control[CMSG_SPACE(FdExchange::kMaxFds * sizeof(int))] = {};
  iovec part{const_cast<Reply*>(&reply), sizeof reply};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (!fds.empty()) {
    message.msg_control = control;
    message.msg_controllen = CMSG_SPACE(fds.size() * sizeof(int));
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(fds.size() * sizeof(int));
    std::memcpy(CMSG_DATA(header), fds.data(), fds.size() * sizeof(int));
  }
  ssize_t sent;
  do {
    sent = sendmsg(socket, &message, MSG_NOSIGNAL);
  } while (sent < 0 && errno == EINTR);
  return sent < 0 ? errno : 0;
}

// Bytes received, 0 at the end, or -errno. EMSGSIZE: descriptors were lost on the way (our limit).
ssize_t receive_with_fds(int socket, Reply* reply, std::vector<UniqueFd>* fds) {
  alignas(cmsghdr) char control[CMSG_SPACE(FdExchange::kMaxFds * sizeof(int))];
  iovec part{reply, sizeof *reply};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  fds->reserve(fds->size() + FdExchange::kMaxFds);  // what has arrived must find an owner
  ssize_t got;
  do {
    got = recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
  } while (got < 0 && errno == EINTR);
  if (got < 0) return -errno;
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); header; header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
    const size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int fd;
      std::memcpy(&fd, CMSG_DATA(header) + i * sizeof(int), sizeof fd);
      fds->emplace_back(fd);
    }
  }
  return message.msg_flags & MSG_CTRUNC ? -EMSGSIZE : got;
}

// The state of one run().
class Run {
 public:
  Run(const FdExchange::Request& request, int listener, const Key& secret)
      : request_(request), listener_(listener), secret_(secret) {}

  Status operator()(std::vector<FdExchange::Peer>* out);

 private:
  enum class Stage { kIdle, kAsked, kDone };
  struct Link {
    Stage pull = Stage::kDone;
    bool served = true;
    UniqueFd socket;  // the one that we pull through
    bool complete() const { return pull == Stage::kDone && served; }
  };
  struct Visitor {
    UniqueFd socket;
    int rank = -1;  // known once its hello was right
    bool served = false;
    int64_t since_ns = 0;
  };

  Status no_sharing(int peer, const char* reason) const;
  Status refused(int peer) const;
  Status ask(int peer, FdExchange::Peer* out);
  Status gave_up(int peer, const Process& process) const;
  Status ended(int peer, const Process& process) const;
  Status take(int peer, FdExchange::Peer* out);
  Status look(int peer, FdExchange::Peer* out);
  Status admit();
  void hear(Visitor* visitor);
  Status give(Visitor* visitor);
  Status missing() const;
  bool finished() const;

  const FdExchange::Request& request_;
  const int listener_;
  const Key secret_;
  std::vector<Link> links_;
  std::vector<Visitor> visitors_;
};

Status Run::no_sharing(int peer, const char* reason) const {
  return error(Code::kUnavailable, peer, "ranks %d and %d do not share memory: %s",
               std::min(request_.rank, peer), std::max(request_.rank, peer), reason);
}

// Nobody listens at the peer's socket: say what is known about why.
Status Run::refused(int peer) const {
  const PeerAddress& theirs = (*request_.addresses)[size_t(peer)];
  if (theirs.host != host_identity()) return no_sharing(peer, "they run on different hosts");
  if (theirs.network_namespace != network_namespace()) {
    return no_sharing(peer,
                      "they are in different network namespaces (containers) and cannot hand each "
                      "other memory");
  }
  if (theirs.user != geteuid()) return no_sharing(peer, "they run as different users");
  char reason[128];
  std::snprintf(reason, sizeof reason,
                "nothing listens for rank %d any more (its process ended or gave up)", peer);
  return no_sharing(peer, reason);
}

Status Run::ended(int peer, const Process& process) const {
  return error(Code::kPeerLost, peer, "rank %d's process (pid %d) ended while connecting", peer,
               int(process.pid));
}

// The peer's end of a connection is closed although we need it. A process closes its files a
// moment before it counts as ended: give it that moment.
Status Run::gave_up(int peer, const Process& process) const {
  for (int i = 0; i < 50; ++i) {
    if (process_ended(process)) return ended(peer, process);
    const timespec pause = to_timespec(kRetryEvery);
    nanosleep(&pause, nullptr);
  }
  char reason[64];
  std::snprintf(reason, sizeof reason, "rank %d gave up while connecting", peer);
  return no_sharing(peer, reason);
}

Status Run::ask(int peer, FdExchange::Peer* out) {
  Link& link = links_[size_t(peer)];
  const PeerAddress& theirs = (*request_.addresses)[size_t(peer)];
  if (!link.socket) link.socket = open_socket();
  if (!link.socket) return system_error(peer, errno, "opening a Unix socket");
  sockaddr_un address;
  const socklen_t bytes = abstract_address(theirs.socket, &address);
  if (::connect(link.socket.get(), reinterpret_cast<sockaddr*>(&address), bytes) != 0) {
    if (errno == EAGAIN || errno == EINTR) return {};  // its queue is full: again later
    if (errno == ECONNREFUSED || errno == ENOENT) return refused(peer);
    return system_error(peer, errno, "connecting a Unix socket");
  }
  if (!same_user(link.socket.get())) return no_sharing(peer, "they run as different users");
  EPCOMM_RETURN_IF_ERROR(peer_process(link.socket.get(), peer, request_.use_pidfd, &out->process));
  Hello hello{};
  std::memcpy(hello.magic, kMagic, sizeof kMagic);
  hello.rank = request_.rank;
  std::memcpy(hello.secret, theirs.secret.data(), theirs.secret.size());
  if (send(link.socket.get(), &hello, sizeof hello, MSG_NOSIGNAL) != ssize_t(sizeof hello)) {
    return errno == EPIPE || errno == ECONNRESET ? gave_up(peer, out->process)
                                                 : system_error(peer, errno, "sending to a peer");
  }
  link.pull = Stage::kAsked;
  return {};
}

// A message or the end of the connection that we pull through.
Status Run::take(int peer, FdExchange::Peer* out) {
  Link& link = links_[size_t(peer)];
  Reply reply{};
  std::vector<UniqueFd> fds;
  const ssize_t got = receive_with_fds(link.socket.get(), &reply, &fds);
  if (got == -EAGAIN) return {};
  if (got == -EMSGSIZE) {
    return error(Code::kSystem, peer,
                 "rank %d's descriptors did not fit: too many open files (ulimit -n)", peer);
  }
  if (got == 0 || got == -ECONNRESET) {
    // At the end it closes because it is done, and then it was served; else it failed.
    if (link.complete()) {
      link.socket.reset();
      return {};
    }
    return gave_up(peer, out->process);
  }
  if (got < 0) return system_error(peer, int(-got), "receiving from a peer");
  if (link.pull != Stage::kAsked || got != ssize_t(sizeof reply) ||
      std::memcmp(reply.magic, kMagic, sizeof kMagic) != 0) {
    return no_sharing(peer, "what answers at the peer's socket is not epcomm");
  }
  if (reply.answer == Answer::kWrongSecret) {
    return no_sharing(peer, "the peer refused this rank's secret: it belongs to another job");
  }
  if (fds.size() != request_.fds.size()) {
    return no_sharing(peer, "the peer gave another number of descriptors");
  }
  out->fds = std::move(fds);
  link.pull = Stage::kDone;
  return {};
}

// Everything about a peer that needs no event.
Status Run::look(int peer, FdExchange::Peer* out) {
  Link& link = links_[size_t(peer)];
  if (link.pull == Stage::kIdle) EPCOMM_RETURN_IF_ERROR(ask(peer, out));
  if (!link.complete() && process_ended(out->process)) return ended(peer, out->process);
  return {};
}

Status Run::admit() {
  while (true) {
    UniqueFd socket(accept4(listener_, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (!socket) {
      if (errno == EAGAIN) return {};
      if (errno == EINTR || errno == ECONNABORTED) continue;
      return system_error(-1, errno, "accepting a peer");
    }
    if (!same_user(socket.get())) continue;
    Visitor visitor;
    visitor.socket = std::move(socket);
    visitor.since_ns = now_ns();
    visitors_.push_back(std::move(visitor));
  }
}

// The first message of somebody who connected. Strangers are dropped; they are not our failure.
void Run::hear(Visitor* visitor) {
  Hello hello{};
  const ssize_t got = recv(visitor->socket.get(), &hello, sizeof hello, MSG_TRUNC);
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
  Key secret;
  std::memcpy(secret.data(), hello.secret, secret.size());
  if (got != ssize_t(sizeof hello) || std::memcmp(hello.magic, kMagic, sizeof kMagic) != 0) {
    visitor->socket.reset();
    return;
  }
  const int rank = hello.rank;
  const bool right = same_key(secret, secret_) && rank >= 0 && size_t(rank) < links_.size() &&
                     !links_[size_t(rank)].served;
  if (!right) {
    Reply reply{};
    std::memcpy(reply.magic, kMagic, sizeof kMagic);
    reply.answer = Answer::kWrongSecret;
    send(visitor->socket.get(), &reply, sizeof reply, MSG_NOSIGNAL);
    visitor->socket.reset();
    return;
  }
  visitor->rank = rank;
}

Status Run::give(Visitor* visitor) {
  Reply reply{};
  std::memcpy(reply.magic, kMagic, sizeof kMagic);
  reply.answer = Answer::kGiven;
  const int why = send_with_fds(visitor->socket.get(), reply, request_.fds);
  // Too many descriptors of this user are on their way: again when peers have taken theirs.
  if (why == ETOOMANYREFS || why == EAGAIN) return {};
  if (why == EPIPE || why == ECONNRESET) {
    visitor->socket.reset();  // it failed; seen on the pull side, with its reason
    return {};
  }
  if (why != 0) return system_error(visitor->rank, why, "giving a descriptor to a peer");
  visitor->served = true;
  links_[size_t(visitor->rank)].served = true;
  return {};
}

Status Run::missing() const {
  std::string names;
  int first = -1, count = 0;
  for (size_t peer = 0; peer < links_.size(); ++peer) {
    if (links_[peer].complete()) continue;
    if (first < 0) first = int(peer);
    if (++count <= 16) names += (count > 1 ? ", " : "") + std::to_string(peer);
  }
  if (count > 16) names += ", ...";
  return error(Code::kTimeout, first,
               "connect: %d rank%s did not come in time: %s; the limit is %g s (timeout_s, "
               "EPCOMM_TIMEOUT_S)",
               count, count == 1 ? "" : "s", names.c_str(), request_.timeout_s);
}

bool Run::finished() const {
  return std::all_of(links_.begin(), links_.end(),
                     [](const Link& link) { return link.complete(); });
}

Status Run::operator()(std::vector<FdExchange::Peer>* out) {
  const size_t num_ranks = request_.addresses->size();
  links_.resize(num_ranks);
  out->clear();
  out->resize(num_ranks);
  for (size_t peer = 0; peer < num_ranks; ++peer) {
    if (!(*request_.addresses)[peer].wanted || int(peer) == request_.rank) continue;
    links_[peer].pull = Stage::kIdle;
    links_[peer].served = false;
  }
  const int64_t deadline = now_ns() + seconds_to_ns(request_.timeout_s);
  int64_t next_interrupt = now_ns() + kInterruptEvery;

  while (true) {
    bool retry = false;
    for (size_t i = 1; i < num_ranks; ++i) {
      const size_t peer = (size_t(request_.rank) + i) % num_ranks;  // not all the same one first
      EPCOMM_RETURN_IF_ERROR(look(int(peer), &(*out)[peer]));
      retry |= links_[peer].pull == Stage::kIdle;
    }
    for (Visitor& visitor : visitors_) {
      if (!visitor.socket || visitor.rank < 0 || visitor.served) continue;
      EPCOMM_RETURN_IF_ERROR(give(&visitor));
      retry |= !visitor.served;
    }
    if (finished()) return {};
    const int64_t now = now_ns();
    if (now >= deadline) return missing();
    if (now >= next_interrupt) {
      if (request_.interrupted && request_.interrupted(request_.interrupted_arg) != 0) {
        return error(Code::kInterrupted, -1, "connect: interrupted");
      }
      next_interrupt = now_ns() + kInterruptEvery;
    }
    visitors_.erase(
        std::remove_if(visitors_.begin(), visitors_.end(),
                       [&](const Visitor& visitor) {
                         return !visitor.socket ||
                                (visitor.rank < 0 && now - visitor.since_ns > kHelloWithin);
                       }),
        visitors_.end());

    std::vector<pollfd> entries{{listener_, POLLIN, 0}};
    std::vector<size_t> pulled;
    for (size_t peer = 0; peer < num_ranks; ++peer) {
      if (!links_[peer].socket || links_[peer].pull == Stage::kIdle) continue;
      entries.push_back({links_[peer].socket.get(), POLLIN, 0});
      pulled.push_back(peer);
    }
    const size_t first_visitor = entries.size();
    for (const Visitor& visitor : visitors_) {
      // Whom we know, we only keep company: its silence and its end are seen on the pull side.
      entries.push_back({visitor.rank < 0 ? visitor.socket.get() : -1, POLLIN, 0});
    }
    const int64_t wait = std::min(retry ? kRetryEvery : kInterruptEvery, deadline - now);
    poll(entries.data(), nfds_t(entries.size()), int((wait + kMillisecond - 1) / kMillisecond));

    for (size_t i = 0; i < pulled.size(); ++i) {
      if (entries[1 + i].revents == 0) continue;
      EPCOMM_RETURN_IF_ERROR(take(int(pulled[i]), &(*out)[pulled[i]]));
    }
    for (size_t i = 0; i < visitors_.size(); ++i) {
      if (entries[first_visitor + i].revents != 0) hear(&visitors_[i]);
    }
    if (entries[0].revents != 0) EPCOMM_RETURN_IF_ERROR(admit());
  }
}

}  // namespace

Status FdExchange::listen() {
  EPCOMM_RETURN_IF_ERROR(random_key(&socket_));
  EPCOMM_RETURN_IF_ERROR(random_key(&secret_));
  UniqueFd listener = open_socket();
  if (!listener) return system_error(-1, errno, "opening a Unix socket");
  sockaddr_un address;
  const socklen_t bytes = abstract_address(socket_, &address);
  if (bind(listener.get(), reinterpret_cast<sockaddr*>(&address), bytes) != 0) {
    return system_error(-1, errno, "binding a Unix socket");
  }
  if (::listen(listener.get(), SOMAXCONN) != 0) {
    return system_error(-1, errno, "listening on a Unix socket");
  }
  listener_ = std::move(listener);
  return {};
}

void FdExchange::describe(Info* info) const {
  info->set("socket", socket_);
  info->set("secret", secret_);
  info->set("host", host_identity());
  info->set("netns", network_namespace());
  info->set("uid", uint64_t(geteuid()));
}

Status FdExchange::parse(const Info& info, int peer, PeerAddress* out) {
  EPCOMM_RETURN_IF_ERROR(info.get(peer, "socket", &out->socket));
  EPCOMM_RETURN_IF_ERROR(info.get(peer, "secret", &out->secret));
  EPCOMM_RETURN_IF_ERROR(info.get(peer, "host", &out->host));
  EPCOMM_RETURN_IF_ERROR(info.get(peer, "netns", &out->network_namespace));
  EPCOMM_RETURN_IF_ERROR(info.get(peer, "uid", &out->user));
  out->wanted = true;
  return {};
}

Status FdExchange::run(const Request& request, std::vector<Peer>* out) {
  if (request.fds.size() > kMaxFds) {
    return error(Code::kInternal, -1, "%zu descriptors to give; at most %zu", request.fds.size(),
                 kMaxFds);
  }
  Status status;
  {
    Run run(request, listener_.get(), secret_);
    status = run(out);
  }
  close();
  if (!status.ok()) out->clear();
  return status;
}

}  // namespace epcomm::common
