"""The outside world, one module per system: etcd, file stores, time. Each implements a protocol of ``ports``."""
