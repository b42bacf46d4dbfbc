// The bytes of mlx5 work requests, doorbells and completions: against the inline functions and
// structures of rdma-core's mlx5dv.h where that is installed, and against vectors written down.
//
//   mlx5_test [--seed S] [--requests N]

#include "epcomm/mlx5.h"

#include <cstring>

#include "check.hpp"

#if __has_include(<infiniband/mlx5dv.h>)
#include <infiniband/mlx5dv.h>
#define HAVE_MLX5DV 1
#else
#define HAVE_MLX5DV 0
#endif

namespace epcomm::testing {
namespace {

std::string hex(const void* data, size_t bytes) {
  std::string text;
  for (size_t i = 0; i < bytes; ++i) {
    char pair[4];
    std::snprintf(pair, sizeof pair, i % 4 == 3 ? "%02x " : "%02x",
                  static_cast<const unsigned char*>(data)[i]);
    text += pair;
  }
  return text;
}

void expect_bytes(const void* data, const std::string& wanted, const char* what) {
  std::string seen = hex(data, wanted.size() / 9 * 4);
  EXPECT(seen == wanted, "%s:\n%s\nexpected\n%s", what, seen.c_str(), wanted.c_str());
}

// Written down by hand from the layout.
void test_vectors() {
  const mlx5::Remote to{0x0102030405060708, 0xa1a2a3a4};
  const mlx5::Local from{0x1112131415161718, 0xb1b2b3b4};
  mlx5::Block block = mlx5::write(0xfffe, 0x123456, mlx5::kSignalled, to, from, 0x1c00);
  expect_bytes(&block,
               "00fffe08 12345603 00000008 00000000 01020304 05060708 a1a2a3a4 00000000 "
               "00001c00 b1b2b3b4 11121314 15161718 00000000 00000000 00000000 00000000 ",
               "write");
  block = mlx5::write_imm(1, 0x42, mlx5::kSignalled | mlx5::kSolicited, to, from, 4, 0x04030201);
  expect_bytes(&block,
               "00000109 00004203 0000000a 01020304 01020304 05060708 a1a2a3a4 00000000 "
               "00000004 b1b2b3b4 11121314 15161718 ",
               "write_imm");
  block = mlx5::fetch_add(0x0102, 0x42, 0, to, from, 0x2122232425262728);
  expect_bytes(&block,
               "00010212 00004204 00000000 00000000 01020304 05060708 a1a2a3a4 00000000 "
               "21222324 25262728 00000000 00000000 00000008 b1b2b3b4 11121314 15161718 ",
               "fetch_add");
  block = mlx5::compare_swap(3, 0x42, mlx5::kFence, to, from, 0x3132333435363738, 0x41);
  expect_bytes(&block,
               "00000311 00004204 00000080 00000000 01020304 05060708 a1a2a3a4 00000000 "
               "00000000 00000041 31323334 35363738 00000008 b1b2b3b4 11121314 15161718 ",
               "compare_swap");
  const uint8_t bytes[28] = {1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14,
                             15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28};
  block = mlx5::write_inline(5, 0x42, 0, to, bytes, 12);
  expect_bytes(&block,
               "00000508 00004203 00000000 00000000 01020304 05060708 a1a2a3a4 00000000 "
               "8000000c 01020304 05060708 090a0b0c 00000000 00000000 00000000 00000000 ",
               "12 bytes inline");
  block = mlx5::write_inline(5, 0x42, 0, to, bytes, 27);
  expect_bytes(&block,
               "00000508 00004204 00000000 00000000 01020304 05060708 a1a2a3a4 00000000 "
               "8000001b 01020304 05060708 090a0b0c 0d0e0f10 11121314 15161718 191a1b00 ",
               "27 bytes inline");
  block = mlx5::write_word(5, 0x42, 0, to, 0x0807060504030201);
  expect_bytes(&block,
               "00000508 00004203 00000000 00000000 01020304 05060708 a1a2a3a4 00000000 "
               "80000008 01020304 05060708 00000000 ",
               "a word inline");
  block = mlx5::nop(7, 0x42, mlx5::kSignalled);
  expect_bytes(&block, "00000700 00004201 00000008 00000000 ", "nop");
  block = mlx5::dump(8, 0x42, mlx5::kFence | mlx5::kSignalled, from, 64);
  expect_bytes(&block, "00000823 00004202 00000088 00000000 00000040 b1b2b3b4 11121314 15161718 ",
               "dump");
  block = mlx5::read(9, 0x42, 0, to, from, 1u << 30);
  expect_bytes(&block,
               "00000910 00004203 00000000 00000000 01020304 05060708 a1a2a3a4 00000000 "
               "40000000 b1b2b3b4 11121314 15161718 ",
               "read");
  block = mlx5::write(9, 0x42, mlx5::kSignalled, to, from, 0);
  expect_bytes(&block, "00000908 00004202 00000008 00000000 01020304 05060708 a1a2a3a4 00000000 ",
               "write of nothing");
  const uint32_t record = mlx5::record_value(0x1fffe);
  expect_bytes(&record, "0000fffe ", "record");
  const uint64_t doorbell = mlx5::doorbell_value(0x1fffe, 0x123456);
  expect_bytes(&doorbell, "00fffe00 12345600 ", "doorbell");
  const uint32_t consumer = mlx5::consumer_value(0x1234567);
  expect_bytes(&consumer, "00234567 ", "consumer record");
  const uint64_t tail = mlx5::cqe_tail({0x12, 0x123456, 0xfffe, 0, mlx5::kCqeRequestError, 1});
  expect_bytes(&tail, "12123456 fffe00d1 ", "end of a completion");
  const uint32_t error = mlx5::cqe_error({0x89, mlx5::kRemoteAccess});
  expect_bytes(&error, "00008913 ", "syndrome");
}

void test_arithmetic() {
  for (const uint32_t depth : {1u, 16u, 64u, 1u << 14, mlx5::kMaxDepth}) {
    for (const uint64_t done :
         {uint64_t(0), uint64_t(65535), uint64_t(65536), (uint64_t(1) << 40) - 3}) {
      for (uint64_t ahead = 0; ahead < depth; ahead = ahead * 3 + 1) {
        EXPECT(mlx5::done_number(done, uint16_t(done + ahead)) == done + ahead + 1, "done_number");
        const uint64_t target = done + ahead + 1;
        EXPECT(!mlx5::collapsed_done(uint16_t(done - 1), target, depth), "depth %u", depth);
        EXPECT(mlx5::collapsed_done(uint16_t(target - 1), target, depth), "depth %u", depth);
      }
    }
  }
  for (uint64_t n = 0; n < 300; ++n) {
    const uint8_t owner = n / 64 & 1;
    EXPECT(mlx5::cqe_valid({0, 0, 0, 0, mlx5::kCqeRequest, owner}, n, 64), "owner");
    EXPECT(!mlx5::cqe_valid({0, 0, 0, 0, mlx5::kCqeRequest, uint8_t(1 - owner)}, n, 64), "owner");
    EXPECT(!mlx5::cqe_valid(mlx5::read_cqe_tail(UINT64_MAX), n, 64), "never written");
  }
}

#if HAVE_MLX5DV

// Whoever reads a block gets back what built it.
void expect_reads(const mlx5::Block& block, uint16_t index, uint8_t opcode, uint32_t qpn,
                  uint8_t flags, const mlx5::Remote& to) {
  const mlx5::Control control = mlx5::read_control(block.segment[0]);
  EXPECT(control.index == index && control.opcode == opcode && control.qpn == qpn &&
             control.flags == flags && control.opmod == 0 && control.signature == 0 &&
             control.reserved == 0,
         "read_control");
  const mlx5::Remote remote = mlx5::read_remote(block.segment[1]);
  EXPECT(remote.address == to.address && remote.rkey == to.rkey, "read_remote");
}

// One random work request, built by rdma-core's functions and by ours.
void test_against_mlx5dv(uint64_t seed, int64_t requests) {
  Random random(seed);
  static_assert(sizeof(mlx5_cqe64) == sizeof(mlx5::Cqe), "");
  int64_t kinds[8] = {};
  for (int64_t i = 0; i < requests; ++i) {
    const uint16_t index = uint16_t(random.next());
    const uint32_t qpn = uint32_t(random.next()) & 0xffffff;
    uint8_t flags = 0;
    if (random.one_in(2)) flags |= MLX5_WQE_CTRL_CQ_UPDATE;
    if (random.one_in(4)) flags |= MLX5_WQE_CTRL_FENCE;
    if (random.one_in(4)) flags |= MLX5_WQE_CTRL_SOLICITED;
    const mlx5::Remote to{random.next(), uint32_t(random.next())};
    const mlx5::Local from{random.next(), uint32_t(random.next())};
    const uint32_t bytes = 1 + uint32_t(random.below(1 << 30));
    const uint64_t a = random.next(), b = random.next();
    const uint32_t imm = uint32_t(random.next());
    alignas(64) unsigned char wanted[64] = {};
    auto* const ctrl = reinterpret_cast<mlx5_wqe_ctrl_seg*>(wanted);
    auto* const raddr = reinterpret_cast<mlx5_wqe_raddr_seg*>(wanted + 16);
    raddr->raddr = htobe64(to.address);
    raddr->rkey = htobe32(to.rkey);
    mlx5::Block block;
    const int kind = int(random.below(8));
    ++kinds[kind];
    uint8_t opcode = MLX5_OPCODE_RDMA_WRITE;
    switch (kind) {
      case 0:
      case 1:
      case 2: {
        opcode = kind == 0   ? MLX5_OPCODE_RDMA_WRITE
                 : kind == 1 ? MLX5_OPCODE_RDMA_WRITE_IMM
                             : MLX5_OPCODE_RDMA_READ;
        mlx5dv_set_ctrl_seg(ctrl, index, opcode, 0, qpn, flags, 3, 0, kind == 1 ? imm : 0);
        mlx5dv_set_data_seg(reinterpret_cast<mlx5_wqe_data_seg*>(wanted + 32), bytes, from.lkey,
                            from.address);
        block = kind == 0   ? mlx5::write(index, qpn, flags, to, from, bytes)
                : kind == 1 ? mlx5::write_imm(index, qpn, flags, to, from, bytes, imm)
                            : mlx5::read(index, qpn, flags, to, from, bytes);
        break;
      }
      case 3:
      case 4: {
        opcode = kind == 3 ? MLX5_OPCODE_ATOMIC_FA : MLX5_OPCODE_ATOMIC_CS;
        mlx5dv_set_ctrl_seg(ctrl, index, opcode, 0, qpn, flags, 4, 0, 0);
        auto* const atomic = reinterpret_cast<mlx5_wqe_atomic_seg*>(wanted + 32);
        atomic->swap_add = htobe64(a);
        atomic->compare = kind == 3 ? 0 : htobe64(b);
        mlx5dv_set_data_seg(reinterpret_cast<mlx5_wqe_data_seg*>(wanted + 48), 8, from.lkey,
                            from.address);
        block = kind == 3 ? mlx5::fetch_add(index, qpn, flags, to, from, a)
                          : mlx5::compare_swap(index, qpn, flags, to, from, b, a);
        break;
      }
      case 5:
      case 6: {
        const uint32_t length = kind == 5 ? uint32_t(random.below(29)) : 8;
        uint8_t payload[28];
        for (uint8_t& byte : payload) byte = uint8_t(random.next());
        if (kind == 6) std::memcpy(payload, &a, 8);
        const uint8_t units = uint8_t(2 + (sizeof(mlx5_wqe_inl_data_seg) + length + 15) / 16);
        mlx5dv_set_ctrl_seg(ctrl, index, opcode, 0, qpn, flags, units, 0, 0);
        auto* const inl = reinterpret_cast<mlx5_wqe_inl_data_seg*>(wanted + 32);
        inl->byte_count = htobe32(MLX5_INLINE_SEG | length);
        std::memcpy(inl + 1, payload, length);
        block = kind == 5 ? mlx5::write_inline(index, qpn, flags, to, payload, length)
                          : mlx5::write_word(index, qpn, flags, to, a);
        break;
      }
      default: {
        std::memset(wanted, 0, sizeof wanted);
        opcode = MLX5_OPCODE_NOP;
        mlx5dv_set_ctrl_seg(ctrl, index, opcode, 0, qpn, flags, 1, 0, 0);
        block = mlx5::nop(index, qpn, flags);
      }
    }
    EXPECT(std::memcmp(&block, wanted, 64) == 0, "request %d, kind %d:\n%s\nexpected\n%s", int(i),
           kind, hex(&block, 64).c_str(), hex(wanted, 64).c_str());
    if (kind < 7) expect_reads(block, index, opcode, qpn, flags, to);

    // A completion, as rdma-core's structure would show it.
    const mlx5::CqeTail tail{opcode,
                             qpn,
                             index,
                             uint8_t(random.next()),
                             uint8_t(random.one_in(2) ? MLX5_CQE_REQ : MLX5_CQE_REQ_ERR),
                             uint8_t(random.below(2))};
    const mlx5::CqeError error{uint8_t(random.next()), uint8_t(random.next())};
    union {
      mlx5::Cqe ours;
      mlx5_cqe64 good;
      mlx5_err_cqe bad;
    } cqe = {};
    const uint64_t end = mlx5::cqe_tail(tail);
    std::memcpy(&cqe.ours.word[14], &end, 8);
    cqe.ours.word[13] = mlx5::cqe_error(error);
    EXPECT(be32toh(cqe.good.sop_drop_qpn) == (uint32_t(opcode) << 24 | qpn) &&
               be16toh(cqe.good.wqe_counter) == index && cqe.good.signature == tail.signature &&
               mlx5dv_get_cqe_opcode(&cqe.good) == tail.opcode &&
               mlx5dv_get_cqe_owner(&cqe.good) == tail.owner &&
               cqe.bad.vendor_err_synd == error.vendor && cqe.bad.syndrome == error.syndrome,
           "completion %d", int(i));
    const mlx5::CqeTail read = mlx5::read_cqe_tail(end);
    const mlx5::CqeError read_error = mlx5::read_cqe_error(cqe.ours.word[13]);
    EXPECT(read.send_opcode == opcode && read.qpn == qpn && read.index == index &&
               read.signature == tail.signature && read.opcode == tail.opcode &&
               read.owner == tail.owner && read_error.vendor == error.vendor &&
               read_error.syndrome == error.syndrome,
           "completion %d, read", int(i));
  }
  for (const int64_t count : kinds) EXPECT(count > requests / 16, "a kind is rare");
  std::printf("%lld random work requests equal rdma-core's\n", (long long)requests);
}

#endif

int run(int argc, char** argv) {
  Options options(argc, argv);
  const uint64_t seed = uint64_t(options.number("seed", 1));
  const int64_t requests = options.number("requests", 1000000);
  options.finish();
  set_deadline(120);
  test_vectors();
  test_arithmetic();
#if HAVE_MLX5DV
  test_against_mlx5dv(seed, requests);
#else
  std::printf("no <infiniband/mlx5dv.h>: compared with vectors only (seed %llu, %lld unused)\n",
              (unsigned long long)seed, (long long)requests);
#endif
  return 0;
}

}  // namespace
}  // namespace epcomm::testing

int main(int argc, char** argv) { return epcomm::testing::run(argc, argv); }
