// Ranks that are processes with a folder in common tell each other bytes.
#pragma once

#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "check.hpp"

namespace epcomm::testing {

inline std::string read_file(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  std::ostringstream text;
  text << in.rdbuf();
  return text.str();
}

// Bytes of this rank under a name, and everybody's in rank order.
inline std::vector<std::string> all_gather(const std::string& folder, const std::string& name,
                                           int rank, int num_ranks, const std::string& mine) {
  const std::string base = folder + "/" + name + ".";
  std::ofstream(base + std::to_string(rank) + ".part", std::ios::binary) << mine;
  EXPECT(rename((base + std::to_string(rank) + ".part").c_str(),
                (base + std::to_string(rank)).c_str()) == 0,
         "rename: %d", errno);
  std::vector<std::string> all;
  for (int other = 0; other < num_ranks; ++other) {
    const std::string path = base + std::to_string(other);
    while (access(path.c_str(), R_OK) != 0) usleep(10000);
    all.push_back(read_file(path));
  }
  return all;
}

}  // namespace epcomm::testing
