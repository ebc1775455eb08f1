// SPDX-License-Identifier: GPL-2.0-or-later
//! A model of the TLBs of one CPU, which shows what the size of the linear map's leaves changes.
//!
//! Each copy of the model receives the same data accesses and differs only in its *grain*, the size
//! of the leaves that map the kernel's linear map. All other addresses have leaves of 4K in every
//! copy and compete for the same entries. An access that finds its leaf in neither level is a
//! *walk*. The first level is fully associative; the second one has sets that the low bits of the
//! leaf's number select, and both replace the entry that was used longest ago.
//!
//! Not modelled: instruction fetches, `DC ZVA` (QEMU does not report its accesses), invalidations,
//! ASIDs, prefetches, and entries of the walk itself. The model counts; it has no time.

use std::{
    ops::Range,
    str::FromStr,
    sync::{Mutex, PoisonError},
};

/// Log2 of the size of leaves outside the linear map.
const OTHER_SHIFT: u32 = 12;

/// Entries of both levels, as `FIRST:WAYSxSETS`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TlbSizes {
    first: usize,
    ways: usize,
    sets: usize,
}

impl FromStr for TlbSizes {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let number = |text: &str| text.parse().ok().filter(|size| (1..=1 << 20).contains(size));
        let (first, second) = text.split_once(':').ok_or(())?;
        let (ways, sets) = second.split_once('x').ok_or(())?;
        let (first, ways, sets) = (number(first), number(ways), number(sets));
        Ok(Self { first: first.ok_or(())?, ways: ways.ok_or(())?, sets: sets.ok_or(())? })
    }
}

/// Arguments of the model.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TlbArguments {
    /// Entries; `None` if TLBs are not modelled.
    pub sizes: Option<TlbSizes>,
    /// Sizes of the linear map's leaves in bytes, powers of two.
    pub grains: Vec<u64>,
    /// Addresses of the linear map.
    pub linear: Range<u64>,
    /// Addresses of the instructions with which a guest begins and ends to run.
    pub guest: Option<(u64, u64)>,
}

impl TlbArguments {
    /// Sets an argument; returns `None` if it is unknown or its value is invalid.
    pub fn set(&mut self, key: &str, value: &str) -> Option<()> {
        let pair = || -> Option<(u64, u64)> {
            let (one, other) = value.split_once(':')?;
            Some((u64::from_str_radix(one, 16).ok()?, u64::from_str_radix(other, 16).ok()?))
        };
        match key {
            "tlb" => self.sizes = Some(value.parse().ok()?),
            "grain" => {
                let grain: u64 = value.parse().ok()?;
                if !grain.is_power_of_two() || grain < 1 << OTHER_SHIFT {
                    return None;
                }
                self.grains.push(grain);
            }
            "linear" => self.linear = pair().map(|(start, end)| start..end)?,
            "guest" => self.guest = Some(pair()?),
            _ => return None,
        }
        Some(())
    }
}

/// TLBs with one size of the linear map's leaves.
#[derive(Debug)]
struct Model {
    grain_shift: u32,
    /// Leaves of the first level, the one used last first.
    first: Vec<u64>,
    /// Leaves of each set of the second level, in the same order.
    second: Vec<Vec<u64>>,
}

/// Puts a leaf to the front of a list of at most `capacity`; returns whether the list had it.
fn touch(list: &mut Vec<u64>, leaf: u64, capacity: usize) -> bool {
    let found = list.iter().position(|entry| *entry == leaf);
    match found {
        Some(at) => list[..=at].rotate_right(1),
        None => {
            list.truncate(capacity - 1);
            list.insert(0, leaf);
        }
    }
    found.is_some()
}

impl Model {
    /// Returns whether an access to a leaf walks the tables.
    fn walks(&mut self, leaf: u64, sizes: TlbSizes) -> bool {
        if touch(&mut self.first, leaf, sizes.first) {
            return false;
        }
        // The low bits of a leaf are its number; the highest ones identify the address space.
        let set = (leaf % (1 << 52)) as usize % sizes.sets;
        !touch(&mut self.second[set], leaf, sizes.ways)
    }
}

/// State that accesses change.
#[derive(Debug)]
struct State {
    models: Vec<Model>,
    /// Page of the last access, which every copy has as its latest entry.
    last_page: Option<u64>,
    is_guest: bool,
}

/// Copies of the model, one for each grain.
#[derive(Debug)]
pub struct Tlbs {
    sizes: TlbSizes,
    linear: Range<u64>,
    /// Addresses of the instructions with which a guest begins and ends to run.
    pub guest: Option<(u64, u64)>,
    state: Mutex<State>,
}

impl Tlbs {
    /// Returns empty TLBs; `None` if they are not modelled.
    pub fn new(arguments: &TlbArguments) -> Option<Self> {
        let sizes = arguments.sizes?;
        let model = |grain: &u64| Model {
            grain_shift: grain.ilog2(),
            first: Vec::with_capacity(sizes.first),
            second: vec![Vec::with_capacity(sizes.ways); sizes.sets],
        };
        let models = arguments.grains.iter().map(model).collect();
        let state = Mutex::new(State { models, last_page: None, is_guest: false });
        Some(Self { sizes, linear: arguments.linear.clone(), guest: arguments.guest, state })
    }

    /// Changes whether a guest runs.
    pub fn set_guest(&self, is_guest: bool) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.is_guest = is_guest;
        state.last_page = None;
    }

    /// Performs an access. Calls `on_walk` with the number of each grain whose copy walks the
    /// tables; returns whether the address is in the linear map.
    pub fn access(&self, address: u64, mut on_walk: impl FnMut(usize, bool)) -> bool {
        let state = &mut *self.state.lock().unwrap_or_else(PoisonError::into_inner);
        // A guest has addresses of its own.
        let is_linear = !state.is_guest && self.linear.contains(&address);
        let page = address >> OTHER_SHIFT;
        if state.last_page.replace(page) == Some(page) {
            return is_linear;
        }
        let space = u64::from(state.is_guest) << 63 | u64::from(is_linear) << 62;
        for (index, model) in state.models.iter_mut().enumerate() {
            let shift = if is_linear { model.grain_shift } else { OTHER_SHIFT };
            if model.walks(space | address >> shift, self.sizes) {
                on_walk(index, is_linear);
            }
        }
        is_linear
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINEAR: u64 = 0xffff_0000_0000_0000;

    fn tlbs(sizes: &str, grains: &[u64]) -> Tlbs {
        let mut arguments = TlbArguments::default();
        arguments.set("tlb", sizes).unwrap();
        arguments.set("linear", "ffff000000000000:ffff800000000000").unwrap();
        for grain in grains {
            arguments.set("grain", &grain.to_string()).unwrap();
        }
        Tlbs::new(&arguments).unwrap()
    }

    /// Returns the walks of each grain for accesses to these addresses.
    fn walks(tlbs: &Tlbs, addresses: impl IntoIterator<Item = u64>) -> [usize; 2] {
        let mut walks = [0; 2];
        for address in addresses {
            tlbs.access(address, |grain, _| walks[grain] += 1);
        }
        walks
    }

    #[test]
    fn a_leaf_of_the_linear_map_has_one_entry() {
        let tlbs = tlbs("4:2x8", &[4096, 2 << 20]);

        let pages = walks(&tlbs, (0..512).map(|page| LINEAR + page * 4096));
        let others = walks(&tlbs, (0..8).map(|page| page * 4096));

        assert_eq!(pages, [512, 1]);
        assert_eq!(others, [8, 8], "leaves of other addresses do not depend on the grain");
    }

    #[test]
    fn the_entry_used_longest_ago_is_replaced() {
        // One entry, then one set of two.
        let tlbs = tlbs("1:2x1", &[4096, 4096]);
        let page = |number: u64| number * 4096;

        assert_eq!(walks(&tlbs, [page(1), page(2)]), [2, 2]);
        assert_eq!(walks(&tlbs, [page(1)]), [0, 0], "the second level has both");
        assert_eq!(walks(&tlbs, [page(3), page(1)]), [1, 1]);
        assert_eq!(walks(&tlbs, [page(2)]), [1, 1], "page 3 replaced page 2");
    }

    #[test]
    fn accesses_to_the_page_of_the_last_one_are_hits() {
        let tlbs = tlbs("1:1x1", &[4096, 65536]);

        assert_eq!(walks(&tlbs, [LINEAR, LINEAR + 4095, LINEAR + 4096]), [2, 1]);
    }

    #[test]
    fn a_guest_has_entries_of_its_own() {
        let tlbs = tlbs("8:2x8", &[4096, 2 << 20]);
        assert_eq!(walks(&tlbs, [LINEAR]), [1, 1]);

        tlbs.set_guest(true);
        let mut is_linear = true;
        let guest = walks(&tlbs, [LINEAR]);
        is_linear &= tlbs.access(LINEAR, |_, _| ());
        tlbs.set_guest(false);

        assert_eq!((guest, is_linear), ([1, 1], false));
        assert_eq!(walks(&tlbs, [LINEAR]), [0, 0]);
    }

    #[test]
    fn invalid_values_are_refused() {
        let mut arguments = TlbArguments::default();

        for (key, value) in [
            ("tlb", "48"),
            ("tlb", "48:4"),
            ("tlb", "0:4x320"),
            ("tlb", "48:0x320"),
            ("grain", "0"),
            ("grain", "2048"),
            ("grain", "5000"),
            ("linear", "1"),
            ("guest", "x:1"),
            ("other", "1"),
        ] {
            assert_eq!(arguments.set(key, value), None, "{key}={value}");
        }
        assert_eq!(arguments, TlbArguments::default());
    }
}
