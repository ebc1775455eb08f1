// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Address arithmetic of host mappings.
//!
//! KVM maps a block of a memslot by one stage-2 entry only if its guest and host addresses are equal
//! modulo the block size (`fault_supports_stage2_huge_mapping` and `kvm_alloc_memslot_metadata` in
//! Linux). A host mapping is therefore placed inside a larger reservation, at the first address that
//! is congruent to the guest address.

/// Returns the first address not below `from` that equals `to` modulo `block`, a power of two.
/// Returns `None` if it exceeds 64 bits.
pub const fn congruent_from(from: u64, to: u64, block: u64) -> Option<u64> {
    let mask = block - 1;
    from.checked_add((to.wrapping_sub(from)) & mask)
}

/// Returns the size of a reservation that fits `size` bytes at a congruent address with a guard page
/// on each side, which prevents a merge with neighbours and faults on an overrun.
pub const fn reservation(size: u64, block: u64, page: u64) -> Option<u64> {
    match size.checked_add(block) {
        Some(sum) => sum.checked_add(2 * page),
        None => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use granule_types::units::Bytes;

    const BLOCKS: [Bytes; 5] =
        [Bytes::kib(4), Bytes::mib(2), Bytes::mib(32), Bytes::mib(512), Bytes::gib(1)];

    #[test]
    fn the_address_is_congruent_and_less_than_a_block_away() {
        for Bytes(block) in BLOCKS {
            for from in [0, 0x1000, 0x7fff_f7a0_1000, 0xffff_8000_0000] {
                for to in [0, 0x1_0000, 0xfffb_ff00_0000, 0xffff_fbff_f000] {
                    let address = congruent_from(from, to, block).unwrap();

                    assert_eq!(address % block, to % block);
                    assert!(address >= from && address - from < block);
                }
            }
        }
    }

    #[test]
    fn a_reservation_fits_the_mapping_and_its_guards() {
        for Bytes(block) in BLOCKS {
            let (page, size, base) = (4096, 3 * block, 0x7f12_3456_7000);
            let length = reservation(size, block, page).unwrap();

            for to in [0, 0x5000, block - page] {
                let address = congruent_from(base + page, to, block).unwrap();

                assert!(address + size + page <= base + length);
            }
        }
    }

    #[test]
    fn sums_beyond_64_bits_are_refused() {
        assert_eq!(congruent_from(u64::MAX - 5, 4, 4096), None);
        assert_eq!(reservation(u64::MAX, 4096, 4096), None);
    }
}
