# What the faces of backends that drive NICs share: the C++ options of queue pairs and how they are filled.

from libc.stdint cimport int64_t, uint32_t, uint64_t
from libcpp cimport bool as cbool
from libcpp.memory cimport shared_ptr
from libcpp.string cimport string
from libcpp.vector cimport vector

from epcomm cimport _cpp
from epcomm._cpp cimport check


cdef extern from "common/rdma/rdma.hpp" namespace "epcomm::common" nogil:
    cppclass VerbsProvider:
        pass

    struct RdmaPath:
        string device
        int port
        int gid_index

    struct RdmaOptions:
        shared_ptr[VerbsProvider] provider
        vector[RdmaPath] paths
        int num_ranks
        int rank
        int num_channels
        uint32_t depth
        cbool relaxed_ordering
        int mtu
        int traffic_class
        int service_level
        int pkey_index


cdef extern from "softhca/provider.hpp" namespace "epcomm::softhca" nogil:
    struct SoftHcaOptions:
        int num_ports
        double gbps
        double latency_us
        uint64_t seed
        string faults
        int64_t spin_us
        cbool null_mover

    _cpp.Status open_provider(const string& name, const SoftHcaOptions& soft, shared_ptr[VerbsProvider]* out)


cdef inline bytes provider_name(object name):
    """``verbs`` or ``soft``, by default what ``EPCOMM_IB_PROVIDER`` says; the software HCA is never chosen silently."""
    from epcomm import config
    if name is None:
        name = "soft" if config.get("EPCOMM_IB_PROVIDER") == "soft" else "verbs"
    return name.encode()


cdef inline int fill(dict options, RdmaOptions* rdma, string* folder, int64_t* spin_us, cbool* use_pidfd) except -1:
    """What every such backend takes from ``options`` and the environment; opens the provider if there are paths."""
    from epcomm import config
    from epcomm.errors import InvalidArgumentError
    cdef RdmaPath path
    cdef SoftHcaOptions soft
    cdef string provider
    spin = options.get("spin_us")
    if spin is not None and not 0 <= spin <= 1_000_000:
        raise InvalidArgumentError(f"spin_us={spin!r}: expected microseconds from 0 to 1000000")
    spin_us[0] = -1 if spin is None else spin
    folder[0] = str(options.get("shm_dir") or config.get("EPCOMM_SHM_DIR") or "").encode()
    use_pidfd[0] = bool(options.get("use_pidfd", True))
    rdma.num_ranks = options.get("num_ranks", 1)
    rdma.rank = options.get("rank", -1)
    rdma.num_channels = options.get("num_channels", 1)
    rdma.depth = options.get("depth", config.get("EPCOMM_IB_DEPTH"))
    rdma.mtu = config.get("EPCOMM_IB_MTU") or 0
    rdma.traffic_class = config.get("EPCOMM_IB_TC")
    rdma.service_level = config.get("EPCOMM_IB_SL")
    rdma.pkey_index = config.get("EPCOMM_IB_PKEY")
    rdma.relaxed_ordering = config.get("EPCOMM_IB_RELAXED_ORDERING") != 0
    for device, port, gid_index in options.get("paths", ()):
        path.device, path.port, path.gid_index = str(device).encode(), port, gid_index
        rdma.paths.push_back(path)
    if rdma.paths.size() == 0:
        return 0
    provider = provider_name(options.get("provider"))
    soft.num_ports = config.get("EPCOMM_SOFTHCA_PORTS")
    soft.gbps = config.get("EPCOMM_SOFTHCA_GBPS")
    soft.latency_us = config.get("EPCOMM_SOFTHCA_LATENCY_US")
    soft.seed = config.get("EPCOMM_SOFTHCA_SEED")
    soft.faults = (config.get("EPCOMM_SOFTHCA_FAULTS") or "").encode()
    soft.spin_us = spin_us[0]
    soft.null_mover = config.get("EPCOMM_SOFTHCA_MOVER") == "null"
    with nogil:
        check(open_provider(provider, soft, &rdma.provider))
    return 0


cdef inline list plan_rows(const string& plan_json):
    """The queue pairs in what C++ calls the plan, which is empty before ``connect``."""
    import json
    text = plan_json.decode()
    return json.loads(text)["rows"] if text else []
