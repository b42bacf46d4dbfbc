// Puts bytes at a place in a peer's heap: straight through its mapping where there is one, else
// through this channel's staging area and put(). One Writer per channel and phase.
#pragma once

#include <vector>

#include "host/engine.hpp"

namespace epcomm::host {

class Writer {
 public:
  Writer(HostTransport* transport, const HeapLayout& layout, const HeapShape& shape, int channel,
         const WaitSpec& spec)
      : transport_(transport),
        channel_(channel),
        staging_(staging_offset(layout, shape, channel)),
        staging_bytes_(uint64_t(shape.staging_bytes)),
        spec_(spec),
        direct_(size_t(shape.num_ranks)),
        used_(staging_bytes_) {  // an earlier phase's puts may not have read it yet
    for (int peer = 0; peer < shape.num_ranks; ++peer)
      direct_[size_t(peer)] = transport->peer_ptr(peer, 0);
  }

  // Staging has room for one piece and up to this much before it.
  static constexpr uint64_t kStagingAlign = 16;

  bool direct(int peer) const { return direct_[size_t(peer)] != nullptr; }

  // Memory to fill with what belongs at `offset` of the peer's heap, valid until the next call.
  // Null after a failure, which status() tells.
  std::byte* at(int peer, uint64_t offset, uint64_t bytes) {
    if (std::byte* base = direct_[size_t(peer)]) return base + offset;
    return stage(peer, offset, bytes);
  }

  // Bytes that lie in the own heap already. They may change after quiet() only.
  void put(int peer, uint64_t offset, uint64_t source, uint64_t bytes) {
    if (status_.ok()) status_ = transport_->put(peer, channel_, offset, source, bytes);
  }

  // Everything staged is on its way; signals of this channel now come behind it.
  const Status& flush() {
    for (const Piece& piece : pieces_) put(piece.peer, piece.offset, piece.source, piece.bytes);
    pieces_.clear();
    return status_;
  }
  // What was put has been read from the own heap.
  const Status& quiet() {
    for (size_t p = 0; p < direct_.size() && status_.ok(); ++p) {
      if (!direct_[p]) status_ = transport_->quiet(int(p), channel_, spec_);
    }
    return status_;
  }
  const Status& status() const { return status_; }

 private:
  struct Piece {
    int peer;
    uint64_t offset, source, bytes;
  };

  // What is aligned at the peer is aligned here: callers fill in whole numbers.
  uint64_t padding(uint64_t offset) const { return (offset - staging_ - used_) % kStagingAlign; }

  std::byte* stage(int peer, uint64_t offset, uint64_t bytes) {
    if (!status_.ok()) return nullptr;
    Piece* last = pieces_.empty() ? nullptr : &pieces_.back();
    if (last && last->peer == peer && last->offset + last->bytes == offset &&
        last->source + last->bytes == staging_ + used_ && bytes <= staging_bytes_ - used_) {
      last->bytes += bytes;
    } else {
      if (used_ + padding(offset) + bytes > staging_bytes_) {
        flush();
        // The staging area is written again only when the transport has read it.
        if (!quiet().ok()) return nullptr;
        used_ = 0;
        if (padding(offset) + bytes > staging_bytes_) {
          status_ = error(Code::kInternal, peer, "%llu bytes do not fit in %llu bytes of staging",
                          (unsigned long long)bytes, (unsigned long long)staging_bytes_);
          return nullptr;
        }
      }
      used_ += padding(offset);
      pieces_.push_back({peer, offset, staging_ + used_, bytes});
    }
    used_ += bytes;
    return transport_->heap() + staging_ + used_ - bytes;
  }

  HostTransport* transport_;
  const int channel_;
  const uint64_t staging_, staging_bytes_;
  const WaitSpec spec_;
  std::vector<std::byte*> direct_;
  std::vector<Piece> pieces_;
  uint64_t used_;
  Status status_;
};

}  // namespace epcomm::host
