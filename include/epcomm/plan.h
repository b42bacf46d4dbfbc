// The QP plan: which queue pair carries what between two ranks. The same text for g++, nvcc and
// NVRTC, so that a CPU proxy and a GPU thread pick the same queue.
//
// A path is one (NIC, port) of a rank. Every (peer, channel) has one RC queue pair: data and the
// signal behind it share it, since nothing else orders them. One channel more, the control channel,
// carries credits and other words that must not queue behind data. Channels take the paths in
// turn, on both sides by the same rule, so both ends of a queue pair agree without talking.
#pragma once

#include "epcomm/base.h"

namespace epcomm {

struct PlanShape {
  int32_t num_ranks;
  int32_t num_channels;  // of data; the control channel has the number num_channels
  int32_t num_paths;     // of this rank
};

struct PlanRow {
  int32_t peer;
  int32_t channel;
  int32_t control;      // 1: the control channel
  int32_t path;         // of this rank
  int32_t remote_path;  // of the peer
};

EPCOMM_HD int32_t plan_path(int32_t channel, int32_t num_paths) { return channel % num_paths; }

// Number of a queue pair among those of this rank; the own rank's numbers stay unused.
EPCOMM_HD int32_t plan_index(const PlanShape& shape, int32_t peer, int32_t channel) {
  return peer * (shape.num_channels + 1) + channel;
}
EPCOMM_HD int32_t plan_size(const PlanShape& shape) {
  return shape.num_ranks * (shape.num_channels + 1);
}

EPCOMM_HD PlanRow plan_row(const PlanShape& shape, int32_t peer, int32_t channel,
                           int32_t peer_num_paths) {
  return {peer, channel, channel == shape.num_channels, plan_path(channel, shape.num_paths),
          plan_path(channel, peer_num_paths)};
}

}  // namespace epcomm
