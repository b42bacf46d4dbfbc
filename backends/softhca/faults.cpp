#include "softhca/faults.hpp"

#include <cerrno>
#include <cmath>
#include <cstdlib>
#include <cstring>

namespace epcomm::softhca {
namespace {

constexpr int64_t kUs = 1000, kMs = 1000 * kUs;

struct Kind {
  const char* name;
  FaultKind kind;
  const char* keys;  // those that it needs or may have beside port, qp, wqe and p
};

constexpr Kind kKinds[] = {
    {"early_fetch", FaultKind::kEarlyFetch, ""},
    {"late_fetch", FaultKind::kLateFetch, "us"},
    {"early_read", FaultKind::kEarlyRead, ""},
    {"delay", FaultKind::kDelay, "us"},
    {"shuffle", FaultKind::kShuffle, ""},
    {"interleave", FaultKind::kInterleave, ""},
    {"poison", FaultKind::kPoison, ""},
    {"cqe_delay", FaultKind::kCqeDelay, "us"},
    {"coalesce", FaultKind::kCoalesce, "us"},
    {"duplicate_doorbell", FaultKind::kDuplicateDoorbell, ""},
    {"lose_doorbell", FaultKind::kLoseDoorbell, "us"},
    {"lose_cqe", FaultKind::kLoseCqe, ""},
    {"flush_once", FaultKind::kFlushOnce, ""},
    {"error", FaultKind::kError, "syndrome"},
    {"no_ack", FaultKind::kNoAck, "count us"},
    {"port_down", FaultKind::kPortDown, "at_ms for_ms"},
    {"slow_port", FaultKind::kSlowPort, "gbps"},
};

std::vector<std::string> split(const std::string& text, const char* separators) {
  std::vector<std::string> parts;
  size_t begin = 0;
  while ((begin = text.find_first_not_of(separators, begin)) != std::string::npos) {
    const size_t end = std::min(text.find_first_of(separators, begin), text.size());
    parts.push_back(text.substr(begin, end - begin));
    begin = end;
  }
  return parts;
}

bool has_word(const char* words, const std::string& word) {
  for (const std::string& one : split(words, " ")) {
    if (one == word) return true;
  }
  return false;
}

bool number(const std::string& text, double low, double high, double* out) {
  char* end = nullptr;
  errno = 0;
  *out = std::strtod(text.c_str(), &end);
  return !text.empty() && *end == 0 && errno == 0 && *out >= low && *out <= high;
}

Status set(Fault* fault, const std::string& key, const std::string& value) {
  struct Row {
    const char* key;
    double low, high;
  };
  static constexpr Row rows[] = {{"port", 0, 255},   {"qp", 0, 1 << 24},   {"wqe", 0, 1e15},
                                 {"p", 0, 1},        {"us", 0, 1e9},       {"at_ms", 0, 1e9},
                                 {"for_ms", 0, 1e9}, {"syndrome", 1, 255}, {"gbps", 1e-6, 1e5},
                                 {"count", 1, 1e9}};
  for (const Row& row : rows) {
    if (key != row.key) continue;
    double read;
    if (!number(value, row.low, row.high, &read)) {
      return error(Code::kInvalidArgument, -1,
                   "EPCOMM_SOFTHCA_FAULTS: %s=%s: expected a number from %g to %g", key.c_str(),
                   value.c_str(), row.low, row.high);
    }
    if (key == "port") fault->port = int(read);
    if (key == "qp") fault->qp = int(read);
    if (key == "wqe") fault->wqe = int64_t(read);
    if (key == "p") fault->p = read;
    if (key == "us") fault->ns = int64_t(read * kUs);
    if (key == "at_ms") fault->at_ns = int64_t(read * kMs);
    if (key == "for_ms") fault->ns = int64_t(read * kMs);
    if (key == "syndrome") fault->syndrome = uint8_t(read);
    if (key == "gbps") fault->gbps = read;
    if (key == "count") fault->count = int64_t(read);
    return {};
  }
  return error(Code::kInternal, -1, "EPCOMM_SOFTHCA_FAULTS: no key %s", key.c_str());
}

}  // namespace

Status parse_faults(const std::string& text, std::vector<Fault>* out) {
  out->clear();
  for (const std::string& part : split(text, ";")) {
    const std::vector<std::string> words = split(part, " ,\t\n");
    if (words.empty()) continue;
    const Kind* kind = nullptr;
    for (const Kind& one : kKinds) {
      if (words[0] == one.name) kind = &one;
    }
    if (!kind) {
      std::string known;
      for (const Kind& one : kKinds) known += (known.empty() ? "" : ", ") + std::string(one.name);
      return error(Code::kInvalidArgument, -1, "EPCOMM_SOFTHCA_FAULTS: %s: expected one of %s",
                   words[0].c_str(), known.c_str());
    }
    Fault fault;
    fault.kind = kind->kind;
    std::string missing = kind->keys;
    for (size_t i = 1; i < words.size(); ++i) {
      const size_t equals = words[i].find('=');
      const std::string key = words[i].substr(0, equals);
      if (equals == std::string::npos ||
          (!has_word("port qp wqe p", key) && !has_word(kind->keys, key))) {
        return error(
            Code::kInvalidArgument, -1,
            "EPCOMM_SOFTHCA_FAULTS: %s %s: expected key=value with a key of port, qp, wqe, p%s%s",
            kind->name, words[i].c_str(), *kind->keys ? ", " : "", kind->keys);
      }
      EPCOMM_RETURN_IF_ERROR(set(&fault, key, words[i].substr(equals + 1)));
      const size_t at = missing.find(key);
      if (at != std::string::npos) missing.erase(at, key.size());
    }
    missing = split(missing, " ").empty() ? "" : split(missing, " ")[0];
    if (!missing.empty() && missing != "at_ms") {
      return error(Code::kInvalidArgument, -1, "EPCOMM_SOFTHCA_FAULTS: %s: %s= is missing",
                   kind->name, missing.c_str());
    }
    out->push_back(fault);
  }
  return {};
}

std::vector<Fault> harmless_disorder() {
  std::vector<Fault> plan;
  // Nothing in it can fail to parse.
  const Status status = parse_faults(
      "early_fetch p=0.5; late_fetch us=60 p=0.05; early_read p=0.3; delay us=100 p=0.05; "
      "shuffle p=0.5; interleave; poison; cqe_delay us=60 p=0.05; coalesce us=40; "
      "duplicate_doorbell p=0.1; lose_doorbell us=300 p=0.02",
      &plan);
  if (!status.ok()) plan.clear();
  return plan;
}

FaultPlan::FaultPlan(const std::vector<Fault>& faults, int port, uint64_t seed)
    : chance_(seed * 0x100000001b3u + uint64_t(port)) {
  for (const Fault& fault : faults) {
    if (fault.port < 0 || fault.port == port) by_kind_[size_t(fault.kind)].push_back(fault);
  }
}

const Fault* FaultPlan::strikes(FaultKind kind, int qp, int64_t wqe) noexcept {
  for (const Fault& fault : by_kind_[size_t(kind)]) {
    if ((fault.qp < 0 || fault.qp == qp) && (fault.wqe < 0 || fault.wqe == wqe) &&
        chance_.happens(fault.p)) {
      return &fault;
    }
  }
  return nullptr;
}

}  // namespace epcomm::softhca
