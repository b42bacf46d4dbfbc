#include <dlfcn.h>

#include <cerrno>
#include <cstring>

#include "common/errors.hpp"
#include "common/rdma/verbs.hpp"

namespace epcomm::common {
namespace {

constexpr char kLibrary[] = "libibverbs.so.1";

// Every function of the library that is called by name. ibv_query_port and ibv_reg_mr are macros
// over these too, but they would be linked; hence the same choices are made by hand below.
#define EPCOMM_VERBS_FUNCTIONS(F) \
  F(ibv_get_device_list)          \
  F(ibv_free_device_list)         \
  F(ibv_get_device_name)          \
  F(ibv_open_device)              \
  F(ibv_close_device)             \
  F(ibv_query_device)             \
  F(ibv_query_port)               \
  F(ibv_query_gid)                \
  F(ibv_alloc_pd)                 \
  F(ibv_dealloc_pd)               \
  F(ibv_reg_mr)                   \
  F(ibv_dereg_mr)                 \
  F(ibv_create_cq)                \
  F(ibv_destroy_cq)               \
  F(ibv_create_qp)                \
  F(ibv_modify_qp)                \
  F(ibv_query_qp)                 \
  F(ibv_destroy_qp)               \
  F(ibv_wc_status_str)

struct Functions {
#define EPCOMM_VERBS_ROW(name) decltype(&::name) name = nullptr;
  EPCOMM_VERBS_FUNCTIONS(EPCOMM_VERBS_ROW)
#undef EPCOMM_VERBS_ROW
  decltype(&::ibv_reg_mr_iova2) ibv_reg_mr_iova2 = nullptr;  // of rdma-core 28 and later
  decltype(&::ibv_fork_init) ibv_fork_init = nullptr;
};

class Libibverbs final : public VerbsProvider {
 public:
  explicit Libibverbs(const Functions& functions) : f_(functions) {}

  const char* name() const noexcept override { return "verbs"; }

  Status device_names(std::vector<std::string>* out) noexcept override {
    return guarded([&]() -> Status {
      out->clear();
      int count = 0;
      errno = 0;
      ibv_device** const list = f_.ibv_get_device_list(&count);
      if (!list) {
        // A kernel without RDMA, or a container that was not given any of it.
        if (errno == ENOSYS || errno == ENOENT) return {};
        return system_error(-1, errno, "ibv_get_device_list");
      }
      for (int i = 0; i < count; ++i) out->emplace_back(f_.ibv_get_device_name(list[i]));
      f_.ibv_free_device_list(list);
      return {};
    });
  }

  ibv_context* open_device(const std::string& name) noexcept override {
    // Before Linux 5.12 a fork (a loader's worker, a subprocess) takes queues that lie in ordinary
    // memory away from the device: the parent writes to a copy from then on. Later kernels need
    // nothing, and the library knows. It fails where somebody has registered memory without it:
    // then it is as it was.
    if (f_.ibv_fork_init) static_cast<void>(f_.ibv_fork_init());
    int count = 0;
    ibv_device** const list = f_.ibv_get_device_list(&count);
    if (!list) return nullptr;
    ibv_context* context = nullptr;
    int why = ENODEV;
    for (int i = 0; i < count; ++i) {
      if (name != f_.ibv_get_device_name(list[i])) continue;
      errno = 0;
      context = f_.ibv_open_device(list[i]);
      why = errno ? errno : EIO;
      break;
    }
    f_.ibv_free_device_list(list);
    errno = context ? 0 : why;
    return context;
  }

  int close_device(ibv_context* context) noexcept override { return f_.ibv_close_device(context); }

  int query_device(ibv_context* context, ibv_device_attr* attr) noexcept override {
    return f_.ibv_query_device(context, attr);
  }

  int query_port(ibv_context* context, uint8_t port, ibv_port_attr* attr) noexcept override {
    std::memset(attr, 0, sizeof *attr);
    verbs_context* const extended = verbs_get_ctx_op(context, query_port);
    if (extended) return extended->query_port(context, port, attr, sizeof *attr);
    return (f_.ibv_query_port)(context, port, reinterpret_cast<_compat_ibv_port_attr*>(attr));
  }

  int query_gid(ibv_context* context, uint8_t port, int index, ibv_gid* gid) noexcept override {
    errno = 0;
    const int result = f_.ibv_query_gid(context, port, index, gid);
    // -1 and errno here, unlike its neighbours.
    return result == 0 ? 0 : errno ? errno : EINVAL;
  }

  ibv_pd* alloc_pd(ibv_context* context) noexcept override { return f_.ibv_alloc_pd(context); }
  int dealloc_pd(ibv_pd* pd) noexcept override { return f_.ibv_dealloc_pd(pd); }

  ibv_mr* reg_mr(ibv_pd* pd, void* address, size_t bytes, int access) noexcept override {
    const unsigned flags = unsigned(access);
    if ((flags & IBV_ACCESS_OPTIONAL_RANGE) && f_.ibv_reg_mr_iova2) {
      return f_.ibv_reg_mr_iova2(pd, address, bytes, reinterpret_cast<uintptr_t>(address), flags);
    }
    // Optional flags may be ignored by definition, and old libraries refuse them.
    return (f_.ibv_reg_mr)(pd, address, bytes, int(flags & ~IBV_ACCESS_OPTIONAL_RANGE));
  }
  int dereg_mr(ibv_mr* mr) noexcept override { return f_.ibv_dereg_mr(mr); }

  ibv_cq* create_cq(ibv_context* context, int depth) noexcept override {
    return f_.ibv_create_cq(context, depth, nullptr, nullptr, 0);
  }
  int destroy_cq(ibv_cq* cq) noexcept override { return f_.ibv_destroy_cq(cq); }

  ibv_qp* create_qp(ibv_pd* pd, ibv_qp_init_attr* attr) noexcept override {
    return f_.ibv_create_qp(pd, attr);
  }
  int modify_qp(ibv_qp* qp, ibv_qp_attr* attr, int mask) noexcept override {
    return f_.ibv_modify_qp(qp, attr, mask);
  }
  int query_qp(ibv_qp* qp, ibv_qp_attr* attr, int mask, ibv_qp_init_attr* init) noexcept override {
    return f_.ibv_query_qp(qp, attr, mask, init);
  }
  int destroy_qp(ibv_qp* qp) noexcept override { return f_.ibv_destroy_qp(qp); }

  Status queue_view(ibv_qp* qp, QueueView* view) noexcept override {
    return mlx5_queue_view(qp, view);
  }

  const char* wc_status_str(ibv_wc_status status) noexcept override {
    return f_.ibv_wc_status_str(status);
  }

 private:
  const Functions f_;
};

}  // namespace

Status open_libibverbs(std::shared_ptr<VerbsProvider>* out) noexcept {
  return guarded([&]() -> Status {
    // Never unloaded: device plug-ins register themselves in it.
    void* const library = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
    if (!library) {
      return error(Code::kUnavailable, -1,
                   "no RDMA verbs library: %s; packages libibverbs1 and ibverbs-providers "
                   "(rdma-core) have it",
                   dlerror());
    }
    Functions functions;
    const char* missing = nullptr;
    const auto find = [&](auto* member, const char* symbol, bool needed) {
      void* const found = dlsym(library, symbol);
      std::memcpy(member, &found, sizeof found);
      if (!found && needed && !missing) missing = symbol;
    };
#define EPCOMM_VERBS_ROW(name) find(&functions.name, #name, true);
    EPCOMM_VERBS_FUNCTIONS(EPCOMM_VERBS_ROW)
#undef EPCOMM_VERBS_ROW
    find(&functions.ibv_reg_mr_iova2, "ibv_reg_mr_iova2", false);
    find(&functions.ibv_fork_init, "ibv_fork_init", false);
    if (missing) {
      return error(Code::kUnavailable, -1, "%s has no %s: it is too old or no libibverbs", kLibrary,
                   missing);
    }
    *out = std::make_shared<Libibverbs>(functions);
    return {};
  });
}

}  // namespace epcomm::common
