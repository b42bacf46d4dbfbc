// The command that asks a proxy to move bytes: 64 bytes in a ring per channel, written by host
// threads or by GPU threads, read by the proxy. The same text for g++, nvcc and NVRTC.
//
// A slot is four quarters of 16 bytes, each with the lap's number behind its fields:
//
//   0   op:8 flags:8 peer:16 | bytes:32 | reserved:32     | tag:32
//   16  src:64                          | memory:32       | tag:32
//   32  dst:64                          | add, low 32     | tag:32
//   48  word:64                         | add, high 32    | tag:32
//
// A reader that finds the lap's number in all four has all of the command, in whatever order the
// quarters arrived; nothing is ever cleared. Offsets count from heaps' begins and are never
// pointers, so that the reader can refuse what leaves the heap. `memory` names what src and dst
// are offsets of: 0, the heap.
//
// Three counters belong to a ring. `issue` is the producer's own: the number of the next command.
// `taken`: commands below it were copied out, their slots may be written again. `done`: commands
// below it were carried out, in order: their sources may be reused. The reader publishes both.
#pragma once

#include "epcomm/base.h"

namespace epcomm {

enum CommandOp : uint32_t {
  kCommandNone = 0,
  kCommandPut = 1,        // bytes from src to dst
  kCommandSignal = 2,     // add to word
  kCommandPutSignal = 3,  // both, the signal behind the bytes
};

struct Command {
  uint32_t op;
  uint32_t flags;  // none so far: 0
  int32_t peer;
  uint32_t bytes;
  uint64_t src;
  uint64_t dst;
  uint64_t word;
  uint64_t add;
};

// Longer puts are several commands: a work request moves at most 1 GiB on every device.
constexpr uint32_t kCommandMaxBytes = 1u << 30;

// A quarter as two words; the tag is the upper half of `high`.
struct alignas(16) CommandQuarter {
  uint64_t low;
  uint64_t high;
};
struct alignas(64) CommandSlot {
  CommandQuarter quarter[4];
};
static_assert(sizeof(CommandSlot) == 64, "host and device agree on it");

// What the reader publishes, each word in a cache line of its own.
struct alignas(64) CommandWords {
  uint64_t taken;
  uint64_t taken_pad[7];
  uint64_t done;
  uint64_t done_pad[7];
};
static_assert(sizeof(CommandWords) == 2 * kSignalStride, "host and device agree on it");

// The tag of command number `index`. Never that of the same slot one lap before, nor, in the first
// laps, that of zeroed memory.
EPCOMM_HD uint32_t command_tag(uint64_t index, uint32_t size) {
  return static_cast<uint32_t>(index / size) + 1u;
}

EPCOMM_HD CommandQuarter command_quarter(uint64_t low, uint32_t third, uint32_t tag) {
  return CommandQuarter{low, third | static_cast<uint64_t>(tag) << 32};
}

EPCOMM_HD CommandSlot encode_command(const Command& command, uint32_t tag) {
  const uint64_t head = (command.op & 0xffu) | (command.flags & 0xffu) << 8 |
                        (static_cast<uint32_t>(command.peer) & 0xffffu) << 16;
  CommandSlot slot;
  slot.quarter[0] = command_quarter(head | static_cast<uint64_t>(command.bytes) << 32, 0, tag);
  slot.quarter[1] = command_quarter(command.src, 0, tag);
  slot.quarter[2] = command_quarter(command.dst, static_cast<uint32_t>(command.add), tag);
  slot.quarter[3] = command_quarter(command.word, static_cast<uint32_t>(command.add >> 32), tag);
  return slot;
}

// False, and nothing else, unless all four quarters carry the tag.
EPCOMM_HD bool decode_command(const CommandSlot& slot, uint32_t tag, Command* out) {
  for (int i = 0; i < 4; ++i) {
    if (static_cast<uint32_t>(slot.quarter[i].high >> 32) != tag) return false;
  }
  const uint64_t head = slot.quarter[0].low;
  out->op = static_cast<uint32_t>(head) & 0xffu;
  out->flags = static_cast<uint32_t>(head >> 8) & 0xffu;
  out->peer = static_cast<int32_t>(head >> 16 & 0xffffu);
  out->bytes = static_cast<uint32_t>(head >> 32);
  out->src = slot.quarter[1].low;
  out->dst = slot.quarter[2].low;
  out->word = slot.quarter[3].low;
  out->add = (slot.quarter[2].high & 0xffffffffu) | slot.quarter[3].high << 32;
  return true;
}

// The ring itself, over a memory policy that says how this side loads and stores what the other
// side sees:
//
//   store_quarter(CommandQuarter* at, const CommandQuarter&)   low is there when high is
//   load_quarter(const CommandQuarter* at)                     high before low, acquire
//
// One producer at a time and one reader. `size` is a power of two.
template <class Memory>
struct CommandRing {
  // A command may be written while index - taken < size.
  static EPCOMM_HD bool has_room(uint64_t index, uint64_t taken, uint32_t size) {
    return index - taken < size;
  }

  // Everything the command speaks of has been made visible to the reader and its NIC before. The
  // quarter with the op comes last, since readers look there first.
  static EPCOMM_HD void write(CommandSlot* slots, uint32_t size, uint64_t index,
                              const Command& command) {
    const CommandSlot slot = encode_command(command, command_tag(index, size));
    CommandSlot* const at = slots + (index & (size - 1));
    Memory::store_quarter(&at->quarter[1], slot.quarter[1]);
    Memory::store_quarter(&at->quarter[2], slot.quarter[2]);
    Memory::store_quarter(&at->quarter[3], slot.quarter[3]);
    Memory::store_quarter(&at->quarter[0], slot.quarter[0]);
  }

  // True if command number `index` is there; it is then in *out and its slot may be given back.
  static EPCOMM_HD bool read(const CommandSlot* slots, uint32_t size, uint64_t index,
                             Command* out) {
    const uint32_t tag = command_tag(index, size);
    const CommandSlot* const at = slots + (index & (size - 1));
    CommandSlot copy;
    for (int i = 0; i < 4; ++i) {
      copy.quarter[i] = Memory::load_quarter(&at->quarter[i]);
      if (static_cast<uint32_t>(copy.quarter[i].high >> 32) != tag) return false;
    }
    return decode_command(copy, tag, out);
  }
};

}  // namespace epcomm
