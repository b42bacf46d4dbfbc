// The rings of mlx5 queue pairs, as libmlx5 shows them. Written from its header; never run on
// hardware.
#include <dlfcn.h>

#include <cerrno>
#include <cstring>

#include "common/errors.hpp"
#include "common/rdma/verbs.hpp"

#if __has_include(<infiniband/mlx5dv.h>)
#include <infiniband/mlx5dv.h>
#define EPCOMM_HAVE_MLX5DV 1
#else
#define EPCOMM_HAVE_MLX5DV 0
#endif

namespace epcomm::common {

#if EPCOMM_HAVE_MLX5DV

namespace {

constexpr char kLibrary[] = "libmlx5.so.1";
constexpr uint32_t kStride = 64;  // of work requests and completions
constexpr int kSendRecord = 1;    // of the two words of a doorbell record

template <class Function>
bool find(void* library, const char* name, Function* out) {
  void* const found = dlsym(library, name);
  std::memcpy(out, &found, sizeof found);
  return found != nullptr;
}

bool power_of_two(uint32_t value) { return value != 0 && (value & (value - 1)) == 0; }

}  // namespace

Status mlx5_queue_view(ibv_qp* qp, QueueView* view) noexcept {
  // libibverbs has it open already if the device is an mlx5; it stays.
  void* const library = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
  decltype(&::mlx5dv_is_supported) is_supported = nullptr;
  decltype(&::mlx5dv_init_obj) init_obj = nullptr;
  if (!library || !find(library, "mlx5dv_is_supported", &is_supported) ||
      !find(library, "mlx5dv_init_obj", &init_obj)) {
    return error(Code::kUnavailable, -1,
                 "%s is not to be had, and only it shows the rings of a queue pair; package "
                 "ibverbs-providers (rdma-core) has it",
                 kLibrary);
  }
  if (!is_supported(qp->context->device)) {
    return error(Code::kUnavailable, -1,
                 "%s is no mlx5 device; work requests of others cannot be built here (ibrc posts "
                 "them through verbs)",
                 qp->context->device->name);
  }
  mlx5dv_qp rings{};
  mlx5dv_cq completions{};
  mlx5dv_obj wanted{};
  wanted.qp = {qp, &rings};
  wanted.cq = {qp->send_cq, &completions};
  if (const int why = init_obj(&wanted, MLX5DV_OBJ_QP | MLX5DV_OBJ_CQ)) {
    return system_error(-1, why > 0 ? why : errno, "mlx5dv_init_obj");
  }
  if (rings.sq.stride != kStride || completions.cqe_size != kStride ||
      !power_of_two(rings.sq.wqe_cnt) || !power_of_two(completions.cqe_cnt)) {
    return error(Code::kUnavailable, -1,
                 "queue pair %u: %u work requests of %u bytes, %u completions of %u; expected "
                 "powers of two of 64 bytes",
                 qp->qp_num, rings.sq.wqe_cnt, rings.sq.stride, completions.cqe_cnt,
                 completions.cqe_size);
  }
  view->sq = rings.sq.buf;
  view->sq_depth = rings.sq.wqe_cnt;
  view->sq_dbrec = rings.dbrec + kSendRecord;
  view->doorbell = static_cast<volatile uint64_t*>(rings.bf.reg);
  view->cq = completions.buf;
  view->cq_depth = completions.cqe_cnt;
  view->cq_dbrec = completions.dbrec;
  view->qpn = qp->qp_num;
  return {};
}

#else

Status mlx5_queue_view(ibv_qp*, QueueView*) noexcept {
  return error(Code::kUnavailable, -1,
               "built without <infiniband/mlx5dv.h> (libibverbs-dev), which shows the rings of a "
               "queue pair");
}

#endif

}  // namespace epcomm::common
