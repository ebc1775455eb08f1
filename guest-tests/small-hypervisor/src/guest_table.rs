// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Interface of the hypervisor to a stage-2 table.

use granule_stage2::{Ipa, PhysAddr};

/// Bytes of a page.
pub const PAGE: u64 = 4096;
/// Bytes of a block.
pub const BLOCK: u64 = 2 << 20;
/// VTCR_EL2 of all tables: 39 address bits from level 1 in 4K pages, write-back, 40-bit output.
pub const VTCR: u64 = 0x8002_3559;
/// VMID of the guest.
pub const VMID: u16 = 1;

/// Use of guest memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Use {
    /// Read and executed.
    Code,
    /// Read and written.
    Data,
}

/// Memory of the guest: a page or a block.
#[derive(Debug, Clone, Copy)]
pub struct Memory {
    /// First guest address.
    pub ipa: Ipa,
    /// First host address.
    pub phys: PhysAddr,
    /// Bytes.
    pub size: u64,
    /// Use.
    pub used_for: Use,
}

/// The stage-2 table of a guest that runs on several CPUs, under a lock. After each call, no CPU uses
/// a removed mapping or permission. `unmap` returns memory that the host may read and write;
/// `map` takes memory that the host has written.
pub trait GuestTable: Send {
    /// Returns the address of the root table.
    fn root(&self) -> PhysAddr;

    /// Returns whether an address is mapped, and writable if `writes`.
    fn permits(&self, ipa: Ipa, writes: bool) -> Option<bool>;

    /// Maps memory where nothing is mapped.
    fn map(&mut self, memory: Memory);

    /// Write-protects the leaves of a range.
    fn write_protect(&mut self, ipa: Ipa, size: u64);

    /// Makes one page writable, which `memory` contains, also for a CPU that holds an entry without this
    /// permission. A write-protected block that maps it is split.
    fn make_page_writable(&mut self, page: Ipa, memory: Memory);

    /// Maps memory as a block that is mapped in pages.
    fn recover_block(&mut self, memory: Memory);

    /// Unmaps a range, which consists of whole leaves.
    fn unmap(&mut self, range: Memory);
}
