// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Regions of guest memory, each mapped in this process, and all regions as one `vm-memory` map.

use std::{
    collections::BTreeMap,
    fmt::Display,
    fs::File,
    num::NonZero,
    ops::Range,
    path::Path,
    sync::{Arc, OnceLock},
    thread,
};

use granule_types::{
    backing::Backing,
    record::ResidentPages,
    units::{Bytes, GuestAddress, HostVirtAddr},
};
use vm_memory::{
    GuestMemoryMmap, GuestRegionMmap,
    bitmap::{AtomicBitmap, Bitmap, WithBitmapSlice},
    mmap::MmapRegionBuilder,
};

use super::{
    BackingPlan, HostPages, MemoryError, PageMap, PageType, Residency, Smaps, block_size,
    mapping::Mapping, pagemap,
};

/// A region of guest memory.
#[derive(Debug)]
pub struct GuestRam {
    start: GuestAddress,
    mapping: Mapping,
    options: RamOptions,
    /// Base pages that devices write, while their writes are logged. KVM logs those of vCPUs only.
    device_writes: OnceLock<AtomicBitmap>,
}

/// Options of a region of guest memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RamOptions {
    /// Populates the memory before the guest touches it.
    pub prefault: bool,
    /// Alignment that guest and host addresses share, a power of two; at least the page size.
    pub alignment: Option<Bytes>,
    /// NUMA node of all pages.
    pub node: Option<u32>,
    /// Populates with several threads.
    pub populates_in_parallel: bool,
}

/// Minimum amount of memory for each thread that populates it or makes it zero.
const MIN_MEMORY_PER_THREAD: Bytes = Bytes::mib(64);

/// Reports whether this host has a NUMA node.
pub fn has_node(node: u32) -> bool {
    Path::new(&format!("/sys/devices/system/node/node{node}")).exists()
}

impl GuestRam {
    /// Maps `size` bytes of guest memory at guest address `start` according to `plan`.
    ///
    /// # Errors
    /// The size is not a multiple of the backing's page size, the hugetlb pool is too small, the
    /// NUMA node does not exist, or the kernel refuses a call or maps pages of another type.
    pub fn new(
        plan: BackingPlan,
        host: &HostPages,
        start: GuestAddress,
        size: Bytes,
        options: RamOptions,
    ) -> Result<Arc<Self>, MemoryError> {
        let page = plan.page_size();
        if !size.0.is_multiple_of(page.0) || size.0 == 0 {
            let text = format!("{size} is not a multiple of {page}, the backing's page size");
            return Err(MemoryError::Invalid(text));
        }
        if plan.is_hugetlb() {
            host.check_hugetlb_pool(page, size)?;
            if let Some(node) = options.node {
                host.check_node_pool(node, page, size)?;
            }
        }
        let block = options.alignment.map_or(page, |align| align.max(page));
        let mapping = Mapping::new(plan, size, start, block, None)?;
        if let Some(node) = options.node {
            if !has_node(node) {
                return Err(MemoryError::Unavailable(format!(
                    "this host has no NUMA node {node}: /sys/devices/system/node lists its nodes"
                )));
            }
            mapping.bind_to_node(node)?;
        }
        let ram = Self { start, mapping, options, device_writes: OnceLock::new() };
        ram.populate()?;
        Ok(Arc::new(ram))
    }

    /// Maps `size` bytes of guest memory whose contents are those of an image, from an offset on. Only
    /// the pages that the guest or a device writes are copied.
    ///
    /// # Errors
    /// The backing does not consist of private base pages, or the kernel refuses a call.
    pub fn mapped(
        plan: BackingPlan,
        start: GuestAddress,
        size: Bytes,
        options: RamOptions,
        image: (Arc<File>, u64),
    ) -> Result<Arc<Self>, MemoryError> {
        if plan.backing() != Backing::Anonymous {
            return Err(MemoryError::Invalid(format!(
                "{} cannot be mapped from a file, only anonymous can: use memory=copy",
                plan.backing()
            )));
        }
        let block = options.alignment.map_or(plan.page_size(), |align| align.max(plan.page_size()));
        let mapping = Mapping::new(plan, size, start, block, Some(image))?;
        if let Some(node) = options.node {
            mapping.bind_to_node(node)?;
        }
        Ok(Arc::new(Self { start, mapping, options, device_writes: OnceLock::new() }))
    }

    /// Maps the file of shared memory once more, with the same pages. Private memory has none.
    pub(super) fn map_again(&self) -> Result<Option<Mapping>, MemoryError> {
        let Some(mapping) = self.mapping.map_again()? else { return Ok(None) };
        if let Some(node) = self.options.node {
            mapping.bind_to_node(node)?;
        }
        Ok(Some(mapping))
    }

    /// Returns the parts of a range that have contents, as offsets; others are zero. The ends of the
    /// range are multiples of the base page size.
    pub(super) fn data_ranges(
        &self,
        pages: &PageMap,
        range: Range<u64>,
    ) -> Result<Vec<Range<u64>>, MemoryError> {
        self.mapping.data_ranges(pages, range)
    }

    /// Starts to log the writes of devices, as base pages. An earlier log, of this boot or of one before a
    /// reset of the guest, becomes empty.
    pub fn log_device_writes(&self) {
        let writes = self.device_writes.get_or_init(|| {
            let page = usize::try_from(self.plan().base_page_size().0).ok();
            let page = page.and_then(NonZero::new).unwrap_or(NonZero::<usize>::MIN);
            AtomicBitmap::new(self.mapping.len(), page)
        });
        writes.reset();
    }

    /// Returns the pages that devices wrote since the last call, one bit each, lowest first; none if
    /// they are not logged.
    pub fn take_device_writes(&self) -> Vec<u64> {
        self.device_writes.get().map(AtomicBitmap::get_and_reset).unwrap_or_default()
    }

    /// Logs a write to the part of a guest address range that is in this region.
    fn mark_device_write(&self, start: u64, end: u64) {
        let Some(writes) = self.device_writes.get() else { return };
        let own = self.start.0;
        let first = start.max(own) - own;
        let last = end.min(own + self.size().0).saturating_sub(own);
        if let Some(length) = last.checked_sub(first)
            && let (Ok(first), Ok(length)) = (usize::try_from(first), usize::try_from(length))
        {
            writes.set_addr_range(first, length);
        }
    }

    /// Returns the plan of the backing.
    pub const fn plan(&self) -> &BackingPlan {
        self.mapping.plan()
    }

    /// Returns the first guest address.
    pub const fn start(&self) -> GuestAddress {
        self.start
    }

    /// Returns the size.
    pub const fn size(&self) -> Bytes {
        Bytes(self.mapping.len() as u64)
    }

    /// Returns the range of guest addresses.
    pub fn guest_range(&self) -> Range<GuestAddress> {
        self.start..GuestAddress(self.start.0 + self.size().0)
    }

    /// Returns the address of the first byte in this process.
    pub fn host_address(&self) -> HostVirtAddr {
        HostVirtAddr(self.mapping.as_ptr().addr() as u64)
    }

    /// Returns the address range in this process.
    pub fn host_range(&self) -> Range<HostVirtAddr> {
        let start = self.host_address();
        start..HostVirtAddr(start.0 + self.size().0)
    }

    /// Returns whether all pages are of one NUMA node.
    pub(super) const fn has_node(&self) -> bool {
        self.options.node.is_some()
    }

    /// Checks that all resident pages have the requested type. Returns their bytes by page size.
    pub fn checked_resident_pages(&self) -> Result<ResidentPages, MemoryError> {
        self.checked_resident_pages_in(&Smaps::read()?)
    }

    /// Checks that all resident pages have the requested type in mappings that were read. Returns their
    /// bytes by page size.
    ///
    /// # Errors
    /// A page has another type, or as for [`Self::resident_pages`].
    pub fn checked_resident_pages_in(&self, smaps: &Smaps) -> Result<ResidentPages, MemoryError> {
        let residency = self.residency(smaps)?;
        self.plan().check_residency(&residency)?;
        Ok(self.sum_by_page_size(&residency))
    }

    /// Returns the resident bytes by page size, without checking the pages.
    pub fn resident_pages(&self) -> Result<ResidentPages, MemoryError> {
        self.resident_pages_in(&Smaps::read()?)
    }

    /// Returns the resident bytes by page size in mappings that were read.
    ///
    /// # Errors
    /// As for [`Self::resident_pages`].
    pub fn resident_pages_in(&self, smaps: &Smaps) -> Result<ResidentPages, MemoryError> {
        Ok(self.sum_by_page_size(&self.residency(smaps)?))
    }

    fn residency(&self, smaps: &Smaps) -> Result<Residency, MemoryError> {
        let residency = smaps.residency(self.host_range())?;
        let PageType::SmallTransparent(size) = self.plan().page_type() else {
            return Ok(residency);
        };
        if residency.base_pages.0 == 0 {
            return Ok(residency.with_small_thp(Bytes(0)));
        }
        let base = self.plan().base_page_size();
        Ok(match pagemap::bytes_in_pages(&self.host_range(), base, size)? {
            // A page of a block consists of smaller ones.
            Some(bytes) => residency.with_small_thp(Bytes(bytes.0.saturating_sub(residency.thp.0))),
            None => residency,
        })
    }

    /// Collapses small pages into huge pages where the kernel can, for example after a partial
    /// discard of a huge page, until `may_continue` returns false. Returns the resident bytes by page
    /// size.
    pub fn collapse(&self, may_continue: &dyn Fn() -> bool) -> Result<ResidentPages, MemoryError> {
        if self.plan().page_type() != PageType::Transparent {
            return Err(MemoryError::Invalid(format!(
                "{} has no transparent huge pages: only anonymous_thp can be collapsed",
                self.plan().backing()
            )));
        }
        self.mapping.collapse(may_continue)?;
        self.resident_pages()
    }

    /// Collapses memory with transparent huge pages of a block. Returns whether the host had the memory
    /// for all of them.
    pub(super) fn collapse_if_transparent(
        &self,
        may_continue: &dyn Fn() -> bool,
    ) -> Result<bool, MemoryError> {
        match self.plan().page_type() {
            PageType::Transparent => self.mapping.collapse(may_continue),
            _ => Ok(true),
        }
    }

    fn sum_by_page_size(&self, residency: &Residency) -> ResidentPages {
        let base = self.plan().base_page_size();
        let parts = [
            (base, residency.base_pages),
            (self.plan().page_size(), residency.small_thp.unwrap_or_default()),
            (block_size(base), residency.thp),
            (residency.kernel_page_size, residency.hugetlb),
        ];
        let mut resident = BTreeMap::new();
        for (page, bytes) in parts {
            if bytes.0 > 0 {
                *resident.entry(page.0).or_insert(0) += bytes.0;
            }
        }
        ResidentPages { resident_bytes: resident }
    }

    /// Drops the backing of the whole region: the next access to each page is a first touch.
    pub fn drop_backing(&self) -> Result<(), MemoryError> {
        self.mapping.drop_backing()
    }

    /// Makes the region usable after [`GuestRam::drop_backing`] and populates it if requested.
    pub fn restore_backing(&self) -> Result<(), MemoryError> {
        if self.plan().needs_remap_after_drop() {
            self.mapping.map_fixed()?;
        }
        self.populate()
    }

    /// Makes the region zero for the next boot of a guest that has reset itself. Nothing else may access
    /// the region, and it must not be [mapped from an image](Self::mapped).
    ///
    /// Hugetlb pages are kept and overwritten, as far as they exist. To discard them would return them to
    /// the pool: another process could take them before they are reserved again, and the reset would fail.
    /// Overwriting costs no more than a fault, in which the kernel zeroes the page.
    ///
    /// Other pages, which have no reservation, are discarded, and populated again if requested: the guest
    /// then takes only the host memory that it touches, and huge pages that its balloon split are whole.
    pub fn clear(&self) -> Result<(), MemoryError> {
        if self.plan().is_hugetlb() {
            return self.mapping.zero_huge_pages(self.useful_threads());
        }
        self.mapping.discard_range(0, self.mapping.len())?;
        self.populate()
    }

    /// Populates a range of guest addresses in this region, whose contents the guest may use.
    ///
    /// # Errors
    /// The kernel lacks `MADV_POPULATE_WRITE` (before Linux 5.14), the host has too few pages, or the
    /// range is not in this region.
    pub fn populate_in_use(&self, start: GuestAddress, size: Bytes) -> Result<(), MemoryError> {
        let offset = start.0.checked_sub(self.start.0);
        let offset = offset
            .filter(|offset| offset.checked_add(size.0).is_some_and(|end| end <= self.size().0));
        let range = offset.and_then(|offset| {
            Some((usize::try_from(offset).ok()?, usize::try_from(size.0).ok()?))
        });
        let Some((offset, size)) = range else {
            let text = format!("{size} at {:#x} are not in the region", start.0);
            return Err(MemoryError::Invalid(text));
        };
        self.mapping.populate_in_use(offset, size)
    }

    /// Discards the base pages of this region that lie completely in a guest address range. Returns
    /// their size. Hugetlb pages are kept: a discard would release their reservation, and another
    /// process could take pages that the guest needs later.
    fn discard(&self, start: u64, end: u64) -> u64 {
        if self.plan().is_hugetlb() {
            return 0;
        }
        let page = self.plan().base_page_size().0;
        let own = self.start.0;
        let first = start.max(own).saturating_sub(own).next_multiple_of(page);
        let last = end.min(own + self.size().0).saturating_sub(own) / page * page;
        if first >= last {
            return 0;
        }
        let range = usize::try_from(first).and_then(|first| Ok((first, usize::try_from(last)?)));
        let Ok((start, end)) = range else { return 0 };
        match self.mapping.discard_range(start, end - start) {
            Ok(()) => last - first,
            // The memory stays resident, which does not affect the guest.
            Err(error) => {
                log::debug!("{error}");
                0
            }
        }
    }

    /// Returns the number of threads that populate the region or make it zero.
    fn useful_threads(&self) -> usize {
        let cpus = match self.options.populates_in_parallel {
            true => thread::available_parallelism().map_or(1, usize::from),
            false => 1,
        };
        let useful = usize::try_from(self.size().0 / MIN_MEMORY_PER_THREAD.0);
        cpus.min(useful.unwrap_or(usize::MAX)).max(1)
    }

    /// Populates the region and verifies the result, if requested. Otherwise nothing is resident that
    /// could be verified.
    fn populate(&self) -> Result<(), MemoryError> {
        if !self.options.prefault {
            return Ok(());
        }
        self.mapping.populate(self.useful_threads())?;
        let resident = Bytes(self.checked_resident_pages()?.resident_bytes.values().sum());
        if resident < self.size() {
            return Err(MemoryError::Unexpected(format!(
                "only {resident} of {} are resident after populating: free memory on the host",
                self.size()
            )));
        }
        Ok(())
    }
}

/// Guest memory, as regions and as a `vm-memory` map.
#[derive(Debug, Clone)]
pub struct GuestMemory {
    map: GuestMap,
    /// Owners of the mappings that `map` refers to.
    rams: Vec<Arc<GuestRam>>,
}

impl GuestMemory {
    /// Combines regions into one map.
    pub fn new(rams: Vec<Arc<GuestRam>>) -> Result<Self, MemoryError> {
        let regions = rams.iter().map(mmap_region).collect::<Result<_, _>>()?;
        let map = GuestMap::from_regions(regions).map_err(|error| invalid_memory(&error))?;
        Ok(Self { map, rams })
    }

    /// Returns the sum of the regions' sizes, which is the size of an image of this memory.
    pub fn size(&self) -> Bytes {
        Bytes(self.rams.iter().map(|ram| ram.size().0).sum())
    }

    /// Makes all memory zero for the next boot of a guest that has reset itself.
    ///
    /// # Errors
    /// The kernel refuses a call, or the host has too little memory to populate it again.
    pub fn clear(&self) -> Result<(), MemoryError> {
        self.rams.iter().try_for_each(|ram| ram.clear())
    }

    /// Discards the whole pages of a range that the guest does not need. The guest reads zeros when
    /// it touches them again. Returns the number of discarded bytes.
    #[must_use]
    pub fn discard(&self, start: GuestAddress, length: Bytes) -> Bytes {
        let end = start.0.saturating_add(length.0);
        self.mark_device_write(start, length);
        let discarded = self.rams.iter().map(|ram| ram.discard(start.0, end)).sum();
        Bytes(discarded)
    }

    /// Logs that a device writes a range of guest addresses, if writes of devices are logged.
    pub fn mark_device_write(&self, start: GuestAddress, length: Bytes) {
        let end = start.0.saturating_add(length.0);
        self.rams.iter().for_each(|ram| ram.mark_device_write(start.0, end));
    }

    /// Returns the regions, in the order passed to [`Self::new`].
    pub fn regions(&self) -> &[Arc<GuestRam>] {
        &self.rams
    }

    /// Returns the `vm-memory` map.
    pub const fn map(&self) -> &GuestMap {
        &self.map
    }
}

/// Map of guest memory for `vm-memory`. Its regions, and clones of them, own their memory.
pub type GuestMap = GuestMemoryMmap<KeepMapped>;

/// Owner of a region's memory in the place of a bitmap. Writes of devices are logged by
/// [`GuestMemory::mark_device_write`].
#[derive(Debug, Clone)]
pub struct KeepMapped(#[expect(dead_code, reason = "it is dropped with the region")] Arc<GuestRam>);

impl WithBitmapSlice<'_> for KeepMapped {
    type S = ();
}

impl Bitmap for KeepMapped {
    fn mark_dirty(&self, _: usize, _: usize) {}

    fn dirty_at(&self, _: usize) -> bool {
        false
    }

    fn slice_at(&self, _: usize) {}
}

/// Returns a region that refers to the mapping of `ram`.
fn mmap_region(ram: &Arc<GuestRam>) -> Result<GuestRegionMmap<KeepMapped>, MemoryError> {
    let mapping = &ram.mapping;
    let builder = MmapRegionBuilder::new_with_bitmap(mapping.len(), KeepMapped(Arc::clone(ram)))
        .with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE)
        .with_mmap_flags(ram.plan().map_flags())
        .with_hugetlbfs(ram.plan().is_hugetlb());
    // SAFETY: pointer and length are those of a mapping with this protection, which the region owns.
    let builder = unsafe { builder.with_raw_mmap_pointer(mapping.as_ptr()) };
    let region = builder.build().map_err(|error| invalid_memory(&error))?;
    GuestRegionMmap::new(region, ram.start())
        .ok_or_else(|| invalid_memory(&"a range exceeds 64 bits"))
}

fn invalid_memory(why: &dyn Display) -> MemoryError {
    MemoryError::Invalid(format!("guest memory is invalid: {why}"))
}
