// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Guest memory on any backing of the host's.
//!
//! A [`Backing`] and the host's page sizes give a
//! [`Plan`], which knows flags, advice, alignment and what counts as obtained. [`GuestRam`] then
//! goes through four steps, in this order because a later one cannot repair an earlier one:
//!
//! 1. **map**: address space is reserved and the memory put into it at an address congruent to the
//!    guest's, so that KVM can use blocks; hugetlb pools are checked before and promised by it;
//! 2. **advise** on transparent huge pages, before the first touch (populating first would fill
//!    the memory with small pages for good);
//! 3. **populate**, only where asked;
//! 4. **verify**: what the kernel says is mapped is read back; small pages where huge ones were
//!    asked for are an error, never a silent loss.

mod align;
mod error;
mod host_pages;
mod mapping;
mod pagemap;
mod plan;
mod smaps;

use std::{collections::BTreeMap, path::Path, sync::Arc};

use granule_types::{
    backing::Backing,
    record::Obtained,
    units::{Bytes, GuestAddress},
};
use vm_memory::{GuestMemoryMmap, GuestRegionMmap, mmap::MmapRegionBuilder};

use mapping::{CallError, Mapping};

pub use error::MemoryError;
pub use host_pages::{HostPages, HugetlbPool, base_page, block_above};
pub use pagemap::BlockBacking;
pub use plan::{DropMethod, Plan};
pub use smaps::Residency;

/// A piece of guest memory and its mapping in this process.
#[derive(Debug)]
pub struct GuestRam {
    plan: Plan,
    start: GuestAddress,
    mapping: Mapping,
    prefault: bool,
    threads: usize,
}

/// What else a piece of guest memory can be asked to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RamOptions {
    /// Populate it before the guest touches it.
    pub prefault: bool,
    /// Guest and host addresses equal modulo this power of two, if it is more than the page.
    pub align: Option<Bytes>,
    /// The only NUMA node it comes from.
    pub node: Option<u32>,
    /// Whether many threads populate it.
    pub parallel: bool,
}

/// How much memory is worth a thread of its own when it is populated.
const POPULATED_BY_THREAD: u64 = 64 << 20;

impl GuestRam {
    /// Maps `size` bytes of guest memory, at guest address `start`, as `plan` says.
    ///
    /// # Errors
    /// The size is no multiple of the backing's page, the pool is short, the kernel refuses, or
    /// it gave other pages than asked for.
    pub fn new(
        plan: Plan,
        host: &HostPages,
        start: GuestAddress,
        size: Bytes,
        prefault: bool,
    ) -> Result<Arc<Self>, MemoryError> {
        let options = RamOptions {
            prefault,
            ..RamOptions::default()
        };
        Self::with_options(plan, host, start, size, options)
    }

    /// As [`GuestRam::new`], with more to ask for.
    ///
    /// # Errors
    /// As [`GuestRam::new`]; or there is no such node.
    pub fn with_options(
        plan: Plan,
        host: &HostPages,
        start: GuestAddress,
        size: Bytes,
        options: RamOptions,
    ) -> Result<Arc<Self>, MemoryError> {
        if !size.0.is_multiple_of(plan.page().0) || size.0 == 0 {
            return Err(MemoryError::Size {
                size,
                page: plan.page(),
            });
        }
        if plan.is_hugetlb() {
            host.pool(plan.page())?.check(size)?;
            if let Some(node) = options.node {
                host.check_node(node, plan.page(), size)?;
            }
        }
        let block = options
            .align
            .map_or(plan.page(), |align| align.max(plan.page()));
        let mapping = Mapping::new(&plan, size, start.0, block)
            .map_err(|failed| call_failed(&plan, size, failed))?;
        if let Some(node) = options.node {
            if !Path::new(&format!("/sys/devices/system/node/node{node}")).exists() {
                return Err(MemoryError::NoNode { node });
            }
            mapping
                .bind(node)
                .map_err(|failed| call_failed(&plan, size, failed))?;
        }
        let cpus = std::thread::available_parallelism().map_or(1, usize::from);
        let worth = usize::try_from(size.0 / POPULATED_BY_THREAD).unwrap_or(usize::MAX);
        let ram = Self {
            plan,
            start,
            mapping,
            prefault: options.prefault,
            threads: if options.parallel {
                cpus.min(worth).max(1)
            } else {
                1
            },
        };
        ram.populate()?;
        Ok(Arc::new(ram))
    }

    /// How the backing is obtained.
    pub const fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Its first guest address.
    pub const fn start(&self) -> GuestAddress {
        self.start
    }

    /// Its size.
    pub const fn size(&self) -> Bytes {
        Bytes(self.mapping.len() as u64)
    }

    /// Its first byte's address in this process.
    pub fn host_address(&self) -> u64 {
        self.mapping.as_ptr().addr() as u64
    }

    /// Reads back what is mapped now, by page size.
    ///
    /// # Errors
    /// The kernel does not tell, or it is not what was asked for.
    pub fn obtained(&self) -> Result<Obtained, MemoryError> {
        let start = self.host_address();
        let range = start..start + self.size().0;
        let usage = Residency::of_range(range.clone())?;
        self.plan.check(&usage)?;
        let (page, base) = (self.plan.page(), self.plan.base_page());
        if page > base
            && let Some(blocks) = BlockBacking::of_range(range, page, base)
            && blocks.broken > 0
        {
            return Err(MemoryError::NotOnePiece {
                backing: self.plan.backing(),
                broken: blocks.broken,
                present: blocks.broken + blocks.whole + blocks.zero,
                page,
            });
        }
        Ok(self.by_page_size(&usage))
    }

    /// Reads back what is mapped now, by page size, whether it was asked for or not.
    ///
    /// # Errors
    /// The kernel does not tell.
    pub fn resident(&self) -> Result<Obtained, MemoryError> {
        let start = self.host_address();
        let usage = Residency::of_range(start..start + self.size().0)?;
        Ok(self.by_page_size(&usage))
    }

    /// Has the kernel put small pages together into huge ones where it can, and reads back what it
    /// has done. Discarding a part of a huge page breaks it up, for one.
    ///
    /// # Errors
    /// The backing is another, or the kernel does not know how.
    pub fn collapse(&self) -> Result<Obtained, MemoryError> {
        if self.plan.backing() != Backing::AnonymousThp {
            return Err(MemoryError::NotThp(self.plan.backing()));
        }
        let done = self
            .mapping
            .collapse()
            .map_err(|failed| call_failed(&self.plan, self.size(), failed))?;
        if !done {
            return Err(MemoryError::NoCollapse);
        }
        self.resident()
    }

    fn by_page_size(&self, usage: &Residency) -> Obtained {
        let parts = [
            (self.plan.base_page(), usage.small),
            (block_above(self.plan.base_page()), usage.huge),
            (usage.kernel_page, usage.hugetlb),
        ];
        let mut resident = BTreeMap::new();
        for (page, bytes) in parts {
            if bytes.0 > 0 {
                *resident.entry(page.0).or_insert(0) += bytes.0;
            }
        }
        Obtained { resident }
    }

    /// Drops everything behind the memory: the next touch is a first one.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn drop_backing(&self) -> Result<(), MemoryError> {
        match self.plan.drop_method() {
            DropMethod::Advice => self.mapping.discard(),
            DropMethod::Hole => self.mapping.punch_hole(),
            DropMethod::Remap => self.mapping.map(&self.plan),
        }
        .map_err(|failed| call_failed(&self.plan, self.size(), failed))
    }

    /// After [`GuestRam::drop_backing`]: makes the memory ready for a first touch again.
    ///
    /// # Errors
    /// The kernel refuses, or what it gives is not what was asked for.
    pub fn restore_backing(&self) -> Result<(), MemoryError> {
        if self.plan.remap_after_drop() {
            self.mapping
                .map(&self.plan)
                .map_err(|failed| call_failed(&self.plan, self.size(), failed))?;
        }
        self.populate()
    }

    /// Drops the whole pages of a range of guest addresses, as far as they lie here. Pages of hugetlb
    /// stay: the guest would lose the promise of them, and others could take what it then lacks.
    fn discard(&self, start: u64, end: u64) -> u64 {
        if self.plan.is_hugetlb() {
            return 0;
        }
        let page = self.plan.base_page().0;
        let own = self.start.0;
        let first = start.max(own).saturating_sub(own).next_multiple_of(page);
        let last = end.min(own + self.size().0).saturating_sub(own) / page * page;
        if first >= last {
            return 0;
        }
        let hole = matches!(self.plan.drop_method(), DropMethod::Hole);
        match self.mapping.discard_range(first, last - first, hole) {
            Ok(()) => last - first,
            // It stays, which costs memory and nothing else.
            Err(CallError { doing, source }) => {
                log::debug!("{doing}: {source}");
                0
            }
        }
    }

    /// Populates where asked to, and verifies that it was done.
    fn populate(&self) -> Result<(), MemoryError> {
        if self.prefault {
            self.mapping
                .populate(&self.plan, self.threads)
                .map_err(|failed| call_failed(&self.plan, self.size(), failed))?;
        }
        let resident = Bytes(self.obtained()?.resident.values().sum());
        if self.prefault && resident < self.size() {
            return Err(MemoryError::NotPopulated {
                size: self.size(),
                resident,
            });
        }
        Ok(())
    }
}

/// All of a guest's memory, as the other virtualisation crates take it.
#[derive(Debug, Clone)]
pub struct GuestMemory {
    map: GuestMemoryMmap,
    /// What `map` describes and does not own.
    rams: Vec<Arc<GuestRam>>,
}

impl GuestMemory {
    /// Puts pieces of memory together.
    ///
    /// # Errors
    /// [`MemoryError::Range`]: a piece leaves 64 bits or overlaps another.
    pub fn new(rams: Vec<Arc<GuestRam>>) -> Result<Self, MemoryError> {
        let regions = rams
            .iter()
            .map(|ram| region(ram))
            .collect::<Result<_, _>>()?;
        let map = GuestMemoryMmap::from_regions(regions).map_err(|error| MemoryError::Range {
            start: rams.first().map_or(0, |ram| ram.start.0),
            size: Bytes(rams.iter().map(|ram| ram.size().0).sum()),
            why: error.to_string(),
        })?;
        Ok(Self { map, rams })
    }

    /// Drops what lies behind a range that the guest does not need any more; it reads as zeros when
    /// it is touched again. Only whole pages of the backing can be dropped, and nothing outside the
    /// memory is. Says how many bytes were dropped.
    #[must_use]
    pub fn discard(&self, start: GuestAddress, length: Bytes) -> Bytes {
        let end = start.0.saturating_add(length.0);
        let dropped = self.rams.iter().map(|ram| ram.discard(start.0, end)).sum();
        Bytes(dropped)
    }

    /// The memory by guest-physical address.
    pub const fn map(&self) -> &GuestMemoryMmap {
        &self.map
    }
}

/// One piece, described without owning it.
fn region(ram: &GuestRam) -> Result<GuestRegionMmap, MemoryError> {
    let range = |why: String| MemoryError::Range {
        start: ram.start.0,
        size: ram.size(),
        why,
    };
    let builder = MmapRegionBuilder::new(ram.mapping.len())
        .with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE)
        .with_mmap_flags(ram.plan.map_flags())
        .with_hugetlbfs(ram.plan.is_hugetlb());
    // SAFETY: pointer and length are those of a mapping with this protection; [`GuestMemory`]
    // holds its owner for as long as the region.
    let builder = unsafe { builder.with_raw_mmap_pointer(ram.mapping.as_ptr()) };
    let region = builder.build().map_err(|error| range(error.to_string()))?;
    GuestRegionMmap::new(region, ram.start).ok_or_else(|| range("it leaves 64 bits".to_owned()))
}

fn call_failed(plan: &Plan, size: Bytes, CallError { doing, source }: CallError) -> MemoryError {
    MemoryError::Call {
        doing,
        size,
        backing: plan.backing(),
        source,
    }
}

#[cfg(test)]
mod tests;
