// Puts and signals of `ibrc` between two processes (put_stress.hpp), on real devices or the
// software HCA. Ranks meet in a folder.
//
//   put_stress --provider verbs --paths rxe0:1:1 --rank 0 --folder /tmp/meet [--puts 100000]
//
// Exit status 77: no library or no device here. tests/rxe runs it in the virtual machine.
#include "put_stress.hpp"

#include <cstdlib>

#include "common/clock.hpp"
#include "ibrc/factory.hpp"
#include "meet.hpp"

namespace epcomm::testing {
namespace {

// "device:port:gid_index,..."
std::vector<common::RdmaPath> parse_paths(const std::string& text) {
  std::vector<common::RdmaPath> paths;
  std::istringstream list(text);
  for (std::string one; std::getline(list, one, ',');) {
    char device[64];
    common::RdmaPath path;
    EXPECT(std::sscanf(one.c_str(), "%63[^:]:%d:%d", device, &path.port, &path.gid_index) == 3,
           "--paths %s: expected device:port:gid_index,...", text.c_str());
    path.device = device;
    paths.push_back(path);
  }
  return paths;
}

int run(int argc, char** argv) {
  Options options(argc, argv);
  const int rank = int(options.number("rank", 0));
  const int puts = int(options.number("puts", 100000));  // of both ranks together
  const int channels = int(options.number("channels", 8));
  const uint64_t seed = uint64_t(options.number("seed", 1));
  const std::string folder = options.text("folder", "/tmp");
  const std::string provider = options.text("provider", "verbs");
  ibrc::Options made;
  made.rdma.paths = parse_paths(options.text("paths", "soft0:1:0"));
  made.rdma.num_ranks = 2;
  made.rdma.rank = rank;
  made.rdma.num_channels = channels;
  made.rdma.depth = uint32_t(options.number("depth", 128));
  made.num_threads = int(options.number("threads", 0));
  softhca::SoftHcaOptions soft;
  soft.seed = uint64_t(options.number("soft-seed", 0));
  options.finish();
  if (Status status = softhca::open_provider(provider, soft, &made.rdma.provider); !status.ok()) {
    std::fprintf(stderr, "%s\n", status.text.c_str());
    return 77;
  }
  set_deadline(1700);

  const PutStress stress(channels, puts / 2 / channels, seed);
  const std::unique_ptr<ibrc::IbrcBackend> ibrc = ibrc::create(made);
  Backend& backend = *ibrc;
  EXPECT_OK(backend.alloc_heap(stress.heap_bytes()));
  std::string mine;
  EXPECT_OK(backend.export_info(&mine));
  const std::vector<std::string> infos = all_gather(folder, "info", rank, 2, mine);
  EXPECT_OK(backend.connect(rank, infos, 0, 120));
  all_gather(folder, "connected", rank, 2, "");
  const int64_t start = common::now_ns();
  stress.run(*backend.host_transport(), rank);
  const double seconds = double(common::now_ns() - start) * 1e-9;
  all_gather(folder, "done", rank, 2, "");
  EXPECT_OK(backend.async_error());
  const ibrc::Stats stats = ibrc->stats();
  std::printf(
      "rank %d: %d puts in %.1f s, %.1f MB/s out; %llu commands, %llu requests in %llu posts, %.2f "
      "commands a post; %llu completions, %llu sleeps\n",
      rank, puts / 2 / channels * channels, seconds, double(stats.bytes) / seconds * 1e-6,
      (unsigned long long)stats.commands, (unsigned long long)stats.requests,
      (unsigned long long)stats.posts, double(stats.commands) / double(stats.posts),
      (unsigned long long)stats.completions, (unsigned long long)stats.sleeps);
  EXPECT_OK(backend.close());
  return 0;
}

}  // namespace
}  // namespace epcomm::testing

int main(int argc, char** argv) { return epcomm::testing::run(argc, argv); }
