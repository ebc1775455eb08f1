// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Features of the network device and the offloads of its tap.

use virtio_bindings::virtio_net::*;

use super::feature_bit;

/// Features that the device offers.
pub const FEATURES: u64 = feature_bit(VIRTIO_NET_F_CSUM)
    | feature_bit(VIRTIO_NET_F_GUEST_CSUM)
    | feature_bit(VIRTIO_NET_F_MAC)
    | feature_bit(VIRTIO_NET_F_GUEST_TSO4)
    | feature_bit(VIRTIO_NET_F_GUEST_TSO6)
    | feature_bit(VIRTIO_NET_F_GUEST_ECN)
    | feature_bit(VIRTIO_NET_F_GUEST_UFO)
    | feature_bit(VIRTIO_NET_F_HOST_TSO4)
    | feature_bit(VIRTIO_NET_F_HOST_TSO6)
    | feature_bit(VIRTIO_NET_F_HOST_ECN)
    | feature_bit(VIRTIO_NET_F_HOST_UFO)
    | feature_bit(VIRTIO_NET_F_MRG_RXBUF)
    | feature_bit(VIRTIO_NET_F_STATUS);

/// Returns the offloads that the kernel may leave to a guest with these features.
pub fn tap_offloads(features: u64) -> libc::c_uint {
    [
        (VIRTIO_NET_F_GUEST_CSUM, libc::TUN_F_CSUM),
        (VIRTIO_NET_F_GUEST_TSO4, libc::TUN_F_TSO4),
        (VIRTIO_NET_F_GUEST_TSO6, libc::TUN_F_TSO6),
        (VIRTIO_NET_F_GUEST_ECN, libc::TUN_F_TSO_ECN),
        (VIRTIO_NET_F_GUEST_UFO, libc::TUN_F_UFO),
    ]
    .into_iter()
    .filter(|(feature, _)| features & feature_bit(*feature) != 0)
    .fold(0, |flags, (_, flag)| flags | flag)
}
