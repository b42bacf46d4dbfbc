// What mlx5 hardware reads and writes: work requests, doorbells, completions. The same text for
// g++, nvcc and NVRTC, so that a CPU thread, a GPU thread and the software model of the hardware
// mean the same bytes.
//
// Everything is big-endian; `word` holds memory as it lies there. Every work request built here is
// one basic block of 64 bytes: the slot in the ring is the running number modulo the depth, and
// nothing ever wraps around the ring's end.
#pragma once

#include "epcomm/base.h"

namespace epcomm::mlx5 {

constexpr uint32_t kBlockBytes = 64;
constexpr uint32_t kCqeBytes = 64;
constexpr uint32_t kMaxInline = 28;            // bytes of an inline write in one block
constexpr uint32_t kMaxMessage = 1u << 30;     // bytes of one work request
constexpr uint32_t kInlineFlag = 0x80000000u;  // of a data segment's byte count
constexpr uint32_t kMaxDepth = 1u << 15;       // numbers on the wire have 16 bits

enum Opcode : uint8_t {
  kNop = 0x00,
  kWrite = 0x08,
  kWriteImm = 0x09,
  kSend = 0x0a,
  kSendImm = 0x0b,
  kRead = 0x10,
  kCompareSwap = 0x11,
  kFetchAdd = 0x12,
  kDump = 0x23,
};

// Flags of a control segment.
enum Flag : uint8_t {
  kSignalled = 2u << 2,  // always a completion; else only after an error
  kSolicited = 1u << 1,
  kFence = 4u << 5,       // after all reads and atomics before it
  kFenceSmall = 1u << 5,  // the initiator's small fence
  kFenceBits = 7u << 5,
};

enum CqeOpcode : uint8_t {
  kCqeRequest = 0,
  kCqeWriteImm = 1,
  kCqeRequestError = 13,
  kCqeResponderError = 14,
  kCqeInvalid = 15,
};

enum Syndrome : uint8_t {
  kLocalLength = 0x01,
  kLocalQp = 0x02,
  kLocalProtection = 0x04,
  kFlushed = 0x05,
  kBadResponse = 0x10,
  kLocalAccess = 0x11,
  kRemoteInvalid = 0x12,
  kRemoteAccess = 0x13,
  kRemoteOperation = 0x14,
  kRetryExceeded = 0x15,
  kRnrRetryExceeded = 0x16,
  kRemoteAborted = 0x22,
};

EPCOMM_HD uint16_t swap16(uint16_t value) { return uint16_t(value << 8 | value >> 8); }

EPCOMM_HD uint32_t swap32(uint32_t value) {
#ifdef __CUDA_ARCH__
  return __byte_perm(value, 0, 0x0123);
#else
  return __builtin_bswap32(value);
#endif
}

EPCOMM_HD uint64_t swap64(uint64_t value) {
  return uint64_t(swap32(uint32_t(value))) << 32 | swap32(uint32_t(value >> 32));
}

// 16 bytes of a work request.
struct alignas(16) Segment {
  uint32_t word[4];
};

// One work request.
struct alignas(64) Block {
  Segment segment[4];
};
static_assert(sizeof(Block) == kBlockBytes, "");

// Memory that a work request names, with the key under which it is registered.
struct Local {
  uint64_t address;
  uint32_t lkey;
};
struct Remote {
  uint64_t address;
  uint32_t rkey;
};

// Segments --------------------------------------------------------------------------------------

// `units`: 16-byte segments of the work request, this one too. `imm` goes out as it is.
EPCOMM_HD Segment control(uint16_t index, uint8_t opcode, uint32_t qpn, uint32_t units,
                          uint8_t flags, uint32_t imm = 0) {
  return {swap32(uint32_t(index) << 8 | opcode), swap32(qpn << 8 | units), uint32_t(flags) << 24,
          imm};
}

EPCOMM_HD Segment remote_segment(const Remote& remote) {
  return {swap32(uint32_t(remote.address >> 32)), swap32(uint32_t(remote.address)),
          swap32(remote.rkey), 0};
}

EPCOMM_HD Segment data_segment(const Local& local, uint32_t bytes) {
  return {swap32(bytes), swap32(local.lkey), swap32(uint32_t(local.address >> 32)),
          swap32(uint32_t(local.address))};
}

EPCOMM_HD Segment atomic_segment(uint64_t swap_or_add, uint64_t compare) {
  return {swap32(uint32_t(swap_or_add >> 32)), swap32(uint32_t(swap_or_add)),
          swap32(uint32_t(compare >> 32)), swap32(uint32_t(compare))};
}

// Work requests ---------------------------------------------------------------------------------

constexpr Segment kEmptySegment = {0, 0, 0, 0};

// Without bytes there is no data segment: a byte count of 0 would mean 2 GiB.
EPCOMM_HD Block message(uint8_t opcode, uint16_t index, uint32_t qpn, uint8_t flags,
                        const Remote& remote, const Local& local, uint32_t bytes, uint32_t imm) {
  return {control(index, opcode, qpn, bytes ? 3 : 2, flags, imm), remote_segment(remote),
          bytes ? data_segment(local, bytes) : kEmptySegment, kEmptySegment};
}

EPCOMM_HD Block write(uint16_t index, uint32_t qpn, uint8_t flags, const Remote& to,
                      const Local& from, uint32_t bytes) {
  return message(kWrite, index, qpn, flags, to, from, bytes, 0);
}

// `imm` in network order.
EPCOMM_HD Block write_imm(uint16_t index, uint32_t qpn, uint8_t flags, const Remote& to,
                          const Local& from, uint32_t bytes, uint32_t imm) {
  return message(kWriteImm, index, qpn, flags, to, from, bytes, imm);
}

EPCOMM_HD Block read(uint16_t index, uint32_t qpn, uint8_t flags, const Remote& from,
                     const Local& to, uint32_t bytes) {
  return message(kRead, index, qpn, flags, from, to, bytes, 0);
}

// A write that carries its bytes, kMaxInline at most; they are read now.
EPCOMM_HD Block write_inline(uint16_t index, uint32_t qpn, uint8_t flags, const Remote& to,
                             const void* from, uint32_t bytes) {
  Block block = {control(index, kWrite, qpn, bytes <= 12 ? 3 : 4, flags), remote_segment(to),
                 kEmptySegment, kEmptySegment};
  block.segment[2].word[0] = swap32(kInlineFlag | bytes);
  const uint8_t* const source = static_cast<const uint8_t*>(from);
  for (uint32_t i = 0; i < bytes; ++i) {
    const uint32_t at = 4 + i;  // behind the byte count
    block.segment[2 + at / 16].word[at % 16 / 4] |= uint32_t(source[i]) << (at % 4 * 8);
  }
  return block;
}

// An inline write of one 64-bit word, in the order of memory.
EPCOMM_HD Block write_word(uint16_t index, uint32_t qpn, uint8_t flags, const Remote& to,
                           uint64_t value) {
  return {control(index, kWrite, qpn, 3, flags),
          remote_segment(to),
          {swap32(kInlineFlag | 8), uint32_t(value), uint32_t(value >> 32), 0},
          kEmptySegment};
}

// The old value goes to 8 bytes at `sink`.
EPCOMM_HD Block fetch_add(uint16_t index, uint32_t qpn, uint8_t flags, const Remote& to,
                          const Local& sink, uint64_t add) {
  return {control(index, kFetchAdd, qpn, 4, flags), remote_segment(to), atomic_segment(add, 0),
          data_segment(sink, 8)};
}

EPCOMM_HD Block compare_swap(uint16_t index, uint32_t qpn, uint8_t flags, const Remote& to,
                             const Local& sink, uint64_t compare, uint64_t swap) {
  return {control(index, kCompareSwap, qpn, 4, flags), remote_segment(to),
          atomic_segment(swap, compare), data_segment(sink, 8)};
}

EPCOMM_HD Block nop(uint16_t index, uint32_t qpn, uint8_t flags) {
  return {control(index, kNop, qpn, 1, flags), kEmptySegment, kEmptySegment, kEmptySegment};
}

// The NIC reads local memory: what it wrote there before is in place when this completes.
EPCOMM_HD Block dump(uint16_t index, uint32_t qpn, uint8_t flags, const Local& from,
                     uint32_t bytes) {
  return {control(index, kDump, qpn, 2, flags), data_segment(from, bytes), kEmptySegment,
          kEmptySegment};
}

// Reading work requests -------------------------------------------------------------------------

struct Control {
  uint8_t opmod;
  uint16_t index;
  uint8_t opcode;
  uint32_t qpn;
  uint32_t units;
  uint8_t signature;
  uint16_t reserved;  // 0
  uint8_t flags;
  uint32_t imm;
};

EPCOMM_HD Control read_control(const Segment& segment) {
  const uint32_t first = swap32(segment.word[0]), second = swap32(segment.word[1]);
  const uint32_t third = swap32(segment.word[2]);
  return {uint8_t(first >> 24), uint16_t(first >> 8),  uint8_t(first),
          second >> 8,          second & 0xff,         uint8_t(third >> 24),
          uint16_t(third >> 8), uint8_t(third & 0xff), segment.word[3]};
}

EPCOMM_HD uint64_t read_long(const Segment& segment, int at) {
  return uint64_t(swap32(segment.word[at])) << 32 | swap32(segment.word[at + 1]);
}

EPCOMM_HD Remote read_remote(const Segment& segment) {
  return {read_long(segment, 0), swap32(segment.word[2])};
}

EPCOMM_HD Local read_local(const Segment& segment) {
  return {read_long(segment, 2), swap32(segment.word[1])};
}

EPCOMM_HD uint32_t read_byte_count(const Segment& segment) { return swap32(segment.word[0]); }

// Doorbells -------------------------------------------------------------------------------------

// Of the doorbell record, a running 16-bit count: `next` is the number behind the last work
// request.
EPCOMM_HD uint32_t record_value(uint64_t next) { return swap32(uint32_t(next) & 0xffff); }

// Of the doorbell register: one aligned 8-byte store.
EPCOMM_HD uint64_t doorbell_value(uint64_t next, uint32_t qpn) {
  return uint64_t(swap32(qpn << 8)) << 32 | swap32((uint32_t(next) & 0xffff) << 8);
}

// Completions -----------------------------------------------------------------------------------

struct alignas(64) Cqe {
  uint32_t word[16];
};
static_assert(sizeof(Cqe) == kCqeBytes, "");

// Its last 8 bytes, which the NIC writes last: who, which, how it went.
struct CqeTail {
  uint8_t send_opcode;
  uint32_t qpn;
  uint16_t index;
  uint8_t signature;
  uint8_t opcode;  // CqeOpcode
  uint8_t owner;
};

EPCOMM_HD CqeTail read_cqe_tail(uint64_t bytes) {
  const uint32_t first = swap32(uint32_t(bytes)), second = swap32(uint32_t(bytes >> 32));
  return {uint8_t(first >> 24),       first & 0xffffff,          uint16_t(second >> 16),
          uint8_t(second >> 8 & 255), uint8_t(second >> 4 & 15), uint8_t(second & 1)};
}

EPCOMM_HD uint64_t cqe_tail(const CqeTail& tail) {
  const uint32_t first = uint32_t(tail.send_opcode) << 24 | tail.qpn;
  const uint32_t second = uint32_t(tail.index) << 16 | uint32_t(tail.signature) << 8 |
                          uint32_t(tail.opcode) << 4 | tail.owner;
  return uint64_t(swap32(second)) << 32 | swap32(first);
}

// Whether entry number `n` of a completion queue has been written: in odd laps the owner bit is 1.
EPCOMM_HD bool cqe_valid(const CqeTail& tail, uint64_t n, uint32_t cq_depth) {
  return tail.opcode != kCqeInvalid && tail.owner == ((n / cq_depth) & 1);
}

// Bytes 52 to 55 of an error completion.
struct CqeError {
  uint8_t vendor;
  uint8_t syndrome;
};

EPCOMM_HD CqeError read_cqe_error(uint32_t bytes) {
  return {uint8_t(bytes >> 16), uint8_t(bytes >> 24)};
}

EPCOMM_HD uint32_t cqe_error(const CqeError& error) {
  return uint32_t(error.syndrome) << 24 | uint32_t(error.vendor) << 16;
}

// Of the consumer's doorbell record.
EPCOMM_HD uint32_t consumer_value(uint64_t next) { return swap32(uint32_t(next) & 0xffffff); }

// The full number behind the work request that a completion names; `done` is the number behind the
// last one known to be complete. At most kMaxDepth are outstanding.
EPCOMM_HD uint64_t done_number(uint64_t done, uint16_t index) {
  return done + uint16_t(index - uint16_t(done)) + 1;
}

// A collapsed completion queue has one entry, written over and over: whether all below `target` are
// done, by the index in it (0xffff before the first). `target` has been posted.
EPCOMM_HD bool collapsed_done(uint16_t index, uint64_t target, uint32_t depth) {
  return uint16_t(uint16_t(target) - index - 2) >= depth;
}

}  // namespace epcomm::mlx5
