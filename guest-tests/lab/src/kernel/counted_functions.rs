// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Kernel functions whose calls are counted.

/// Name of each count, and the functions that may stand for it, in order of preference: kernel
/// versions name them differently.
const FUNCTIONS: [(&str, &[&str]); 6] = [
    ("guest_aborts", &["kvm_handle_guest_abort"]),
    ("page_lookups", &["__gfn_to_pfn_memslot", "__kvm_faultin_pfn"]),
    ("notifier_unmaps", &["kvm_unmap_hva_range", "kvm_unmap_gfn_range"]),
    ("stage2_maps", &["kvm_pgtable_stage2_map"]),
    ("memcache_topups", &["kvm_mmu_topup_memory_cache", "__kvm_mmu_topup_memory_cache"]),
    ("permission_relaxations", &["kvm_pgtable_stage2_relax_perms"]),
];

/// Returns the counts and the addresses of their functions in a `System.map`.
pub fn counted_functions(system_map: &str) -> Vec<(String, u64)> {
    let address = |wanted: &str| {
        system_map.lines().find_map(|line| {
            let mut words = line.split_ascii_whitespace();
            let address = u64::from_str_radix(words.next()?, 16).ok()?;
            (words.nth(1)? == wanted).then_some(address)
        })
    };
    FUNCTIONS
        .iter()
        .filter_map(|(name, functions)| {
            let address = functions.iter().find_map(|function| address(function))?;
            Some(((*name).to_owned(), address))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_function_is_found_by_its_name_in_either_kernel() {
        let old = "ffff800010000000 T _text\nffff80001002eeb0 T kvm_unmap_hva_range\n";
        let new = "ffff80001002eeb8 T kvm_unmap_gfn_range\n\nffff8000ffffffff A\n";

        for (map, address) in [(old, 0xffff_8000_1002_eeb0), (new, 0xffff_8000_1002_eeb8)] {
            let expected = [("notifier_unmaps".to_owned(), address)];
            assert_eq!(counted_functions(map), expected);
        }
    }
}
