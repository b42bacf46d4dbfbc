// Posting to and polling of one mlx5 queue pair by whoever holds its rings: a CPU thread or a GPU
// thread, by a memory policy. The same text for g++, nvcc and NVRTC.
//
// Numbers of work requests only grow, in 64 bits; 16 of them go over the wire. One number is one
// block. The completion queue belongs to this queue pair alone, and no more is under way than it
// holds: entries are never overwritten before they were polled.
//
// Alone: one thread posts. reserve() and publish() are plain arithmetic: build blocks, one fence,
// doorbell record, doorbell. Shared: any number of threads. Each reserves numbers, builds, makes
// its range ready in order, and the doorbell is rung by whoever is last. A thread that has reserved
// and is not running holds up those behind it; posting stays correct.
//
// A policy `M` has these static members. "Local" words belong to those who post; the NIC does not
// see them.
//   uint64_t load(const uint64_t*)                local, relaxed
//   uint64_t acquire(const uint64_t*)             local
//   void store(uint64_t*, uint64_t)               local, release
//   uint64_t add(uint64_t*, uint64_t)             local, relaxed; the old value
//   bool claim(uint64_t*, uint64_t* next)         local, relaxed: adds 1 if it is *next, which
//                                                 else becomes what it is
//   bool exchange(uint32_t*, uint32_t old, uint32_t value)   local, acquire and release
//   void set_segment(Segment*, const Segment&)    for the NIC, no order
//   void fence()                                  all stores before, local or for the NIC, become
//                                                 visible to the NIC before all stores after
//   void set_record(uint32_t*, uint32_t)          for the NIC, release
//   void tell(uint32_t* record, uint32_t, uint64_t* doorbell, uint64_t)   for the NIC: both, the
//                                                 doorbell by one 8-byte store, after a fence()
//   uint64_t take(const uint64_t*)                written by the NIC; acquire
//   uint32_t peek(const uint32_t*)                written by the NIC before what take() saw
//   void pause()
#pragma once

#include "epcomm/mlx5.h"

namespace epcomm::mlx5 {

// Where the rings lie, as seen by whoever posts.
struct Rings {
  uint64_t sq;         // Block[sq_depth]
  uint64_t sq_record;  // uint32_t: send counter
  uint64_t doorbell;   // uint64_t
  uint64_t cq;         // Cqe[cq_depth]
  uint64_t cq_record;  // uint32_t: consumer counter
  uint32_t qpn;
  uint32_t sq_depth;  // powers of two
  uint32_t cq_depth;
  uint32_t room;  // work requests that may be under way: no more than either depth
};

// Of those who post, zero at first. Each behind a line of its own: different threads write them.
struct Numbers {
  alignas(64) uint64_t reserved;  // numbers below are given away
  alignas(64) uint64_t ready;     // numbers below are built
  alignas(64) uint64_t rung;      // numbers below are known to the NIC
  uint32_t ring_lock;
  alignas(64) uint64_t done;  // numbers below are complete
  uint64_t polled;            // entries of the completion queue
  uint64_t failed;            // the first error, see failure(); sticky
  uint32_t poll_lock;
};

// Why a queue pair takes no more work.
struct Failure {
  uint8_t syndrome;  // kNoSense: the completion names no work request that is outstanding
  uint8_t vendor;
  uint16_t index;
};
constexpr uint8_t kNoSense = 0xff;

EPCOMM_HD uint64_t failed_value(const Failure& failure) {
  return uint64_t(1) << 32 | uint64_t(failure.index) << 16 | uint64_t(failure.syndrome) << 8 |
         failure.vendor;
}
EPCOMM_HD Failure failure(uint64_t failed) {
  return {uint8_t(failed >> 8), uint8_t(failed), uint16_t(failed >> 16)};
}

template <class M>
struct Queue {
  // Whether number `number` may be built: its slot's last work request is complete.
  static EPCOMM_HD bool has_room(const Rings& rings, const Numbers* numbers, uint64_t number) {
    return number - M::acquire(&numbers->done) < rings.room;
  }

  static EPCOMM_HD void set(const Rings& rings, uint64_t number, const Block& block) {
    Block* const slot = reinterpret_cast<Block*>(rings.sq) + (number & (rings.sq_depth - 1));
    M::set_segment(&slot->segment[1], block.segment[1]);
    M::set_segment(&slot->segment[2], block.segment[2]);
    M::set_segment(&slot->segment[3], block.segment[3]);
    M::set_segment(&slot->segment[0], block.segment[0]);
  }

  // Alone --------------------------------------------------------------------------------------

  // All blocks below `next` are built: one fence, then the NIC is told.
  static EPCOMM_HD void publish(const Rings& rings, Numbers* numbers, uint64_t next) {
    M::fence();
    tell(rings, next);
    M::store(&numbers->rung, next);
  }

  // Shared -------------------------------------------------------------------------------------

  static EPCOMM_HD uint64_t reserve(Numbers* numbers, uint64_t count) {
    return M::add(&numbers->reserved, count);
  }

  // Reserves one number if there is room for it now.
  static EPCOMM_HD bool reserve_one(const Rings& rings, Numbers* numbers, uint64_t* number) {
    uint64_t next = M::load(&numbers->reserved);
    do {
      if (!has_room(rings, numbers, next)) return false;
    } while (!M::claim(&numbers->reserved, &next));
    *number = next;
    return true;
  }

  // Whether the numbers before `begin` are built, so that commit() may follow.
  static EPCOMM_HD bool is_next(const Numbers* numbers, uint64_t begin) {
    return M::acquire(&numbers->ready) == begin;
  }

  // The range from `begin`, for which is_next() holds, is built. The fence is this thread's own:
  // the one of whoever rings does not push its stores.
  static EPCOMM_HD void commit(Numbers* numbers, uint64_t begin, uint64_t count) {
    M::fence();
    M::store(&numbers->ready, begin + count);
  }

  // Whether the NIC has been told of all that is ready, by this thread or by another one. False:
  // another one is telling it, and may have looked before our commit; come again. Never backwards:
  // the lock orders record and doorbell of those who ring.
  static EPCOMM_HD bool ring_ready(const Rings& rings, Numbers* numbers) {
    while (M::acquire(&numbers->rung) < M::acquire(&numbers->ready)) {
      if (!M::exchange(&numbers->ring_lock, 0, 1)) return false;
      const uint64_t next = M::acquire(&numbers->ready);
      if (M::load(&numbers->rung) < next) {
        M::fence();  // what others committed was visible before; now also before what follows
        tell(rings, next);
        M::store(&numbers->rung, next);
      }
      M::exchange(&numbers->ring_lock, 1, 0);
    }
    return true;
  }

  // Completions --------------------------------------------------------------------------------

  // Takes at most `most` completions; how many there were. One thread at a time. After an error
  // `failed` is not 0 and `done` stands still at the work request that failed: errors come in
  // order, so all before it was carried out, whether it asked for a completion or not; but not
  // where it was flushed, since of many that are, a NIC may tell of one.
  static EPCOMM_HD int poll(const Rings& rings, Numbers* numbers, int most) {
    uint64_t polled = numbers->polled, done = M::load(&numbers->done);
    int taken = 0;
    for (; taken < most; ++taken, ++polled) {
      const uint64_t entry = rings.cq + (polled & (rings.cq_depth - 1)) * kCqeBytes;
      const CqeTail tail = read_cqe_tail(M::take(reinterpret_cast<const uint64_t*>(entry + 56)));
      if (!cqe_valid(tail, polled, rings.cq_depth)) break;
      const uint64_t behind = done_number(done, tail.index);
      if (tail.opcode != kCqeRequest) {
        const CqeError error = read_cqe_error(M::peek(reinterpret_cast<uint32_t*>(entry + 52)));
        if (M::load(&numbers->failed) == 0 && behind - done <= rings.room &&
            error.syndrome != kFlushed) {
          done = behind - 1;
        }
        fail(numbers, {error.syndrome, error.vendor, tail.index});
      } else if (behind - done > rings.room || tail.qpn != rings.qpn) {
        fail(numbers, {kNoSense, 0, tail.index});
      }
      if (M::load(&numbers->failed) == 0) done = behind;
    }
    if (taken == 0) return 0;
    numbers->polled = polled;
    M::set_record(record(rings.cq_record), consumer_value(polled));
    M::store(&numbers->done, done);
    return taken;
  }

  // The same, by any thread: nothing if another one polls now.
  static EPCOMM_HD int poll_shared(const Rings& rings, Numbers* numbers, int most) {
    if (!M::exchange(&numbers->poll_lock, 0, 1)) return 0;
    const int taken = poll(rings, numbers, most);
    M::exchange(&numbers->poll_lock, 1, 0);
    return taken;
  }

 private:
  static EPCOMM_HD void fail(Numbers* numbers, const Failure& why) {
    if (M::load(&numbers->failed) == 0) M::store(&numbers->failed, failed_value(why));
  }

  static EPCOMM_HD void tell(const Rings& rings, uint64_t next) {
    M::tell(record(rings.sq_record), record_value(next),
            reinterpret_cast<uint64_t*>(rings.doorbell), doorbell_value(next, rings.qpn));
  }

  static EPCOMM_HD uint32_t* record(uint64_t address) {
    return reinterpret_cast<uint32_t*>(address);
  }
};

}  // namespace epcomm::mlx5
