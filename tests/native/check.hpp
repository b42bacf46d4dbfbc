// What the native programs share: a check that ends the program, seeded numbers, options, ranks as
// threads, a deadline.
#pragma once

#include <unistd.h>

#include <csignal>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <thread>
#include <vector>

namespace epcomm::testing {

__attribute__((format(printf, 4, 5), noreturn)) inline void fail(const char* file, int line,
                                                                 const char* condition,
                                                                 const char* format, ...) {
  char text[2048];
  va_list args;
  va_start(args, format);
  std::vsnprintf(text, sizeof text, format, args);
  va_end(args);
  std::fflush(stdout);
  std::fprintf(stderr, "%s:%d: %s is false: %s\n", file, line, condition, text);
  std::fflush(stderr);
  std::_Exit(1);  // other threads are in the middle of calls: no destructors
}

// Any thread.
#define EXPECT(condition, ...)                                                              \
  do {                                                                                      \
    if (!(condition)) ::epcomm::testing::fail(__FILE__, __LINE__, #condition, __VA_ARGS__); \
  } while (0)

#define EXPECT_OK(expr)                                                  \
  do {                                                                   \
    const ::epcomm::Status expect_status_ = (expr);                      \
    EXPECT(expect_status_.ok(), "code %d: %s", int(expect_status_.code), \
           expect_status_.text.c_str());                                 \
  } while (0)

// splitmix64: the same numbers everywhere, from any seed.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}

  uint64_t next() {
    uint64_t z = (state_ += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  // 0 .. n - 1
  int64_t below(int64_t n) { return int64_t(next() % uint64_t(n)); }
  int64_t between(int64_t low, int64_t high) { return low + below(high - low + 1); }
  bool one_in(int64_t n) { return below(n) == 0; }

 private:
  uint64_t state_;
};

inline uint64_t mix(uint64_t a, uint64_t b, uint64_t c = 0, uint64_t d = 0) {
  return Random(Random(Random(Random(a).next() ^ b).next() ^ c).next() ^ d).next();
}

// `--name value` pairs of a command line. An unknown name fails at the end of the options' reading.
class Options {
 public:
  Options(int argc, char** argv) {
    EXPECT(argc % 2 == 1, "options are pairs: --name value");
    for (int i = 1; i + 1 < argc; i += 2) values_[argv[i]] = argv[i + 1];
  }
  std::string text(const std::string& name, const std::string& otherwise) {
    known_.insert("--" + name);
    const auto found = values_.find("--" + name);
    return found == values_.end() ? otherwise : found->second;
  }
  int64_t number(const std::string& name, int64_t otherwise) {
    return std::stoll(text(name, std::to_string(otherwise)));
  }
  void finish() const {
    for (const auto& [name, value] : values_) {
      EXPECT(known_.count(name), "unknown option %s", name.c_str());
    }
  }

 private:
  std::map<std::string, std::string> values_;
  std::set<std::string> known_;
};

// body(rank) in one thread per rank.
inline void run_ranks(int num_ranks, const std::function<void(int)>& body) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < num_ranks; ++rank) threads.emplace_back(body, rank);
  for (std::thread& thread : threads) thread.join();
}

// Ends the program if it takes longer: a hang is a failure with a name.
inline void set_deadline(unsigned seconds) {
  std::signal(SIGALRM, [](int) {
    static const char text[] = "the deadline passed: some rank hangs\n";
    if (write(2, text, sizeof text - 1) < 0) _exit(4);
    _exit(3);
  });
  alarm(seconds);
}

}  // namespace epcomm::testing
