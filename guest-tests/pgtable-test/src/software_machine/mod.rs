// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The software machine: threads for vCPUs, the [`granule_stage2`] engine for the hypervisor.
//!
//! It shows, on any computer and in about a second, what a policy of the fault path does to the
//! phases of the test.
//!
//! *What is real*: the engine's work on the tables, its locks, and who waits for whom; the memory,
//! and every line that is cleaned, by the CPU's own instruction, which is most of what the policies
//! differ in; the elapsed time.
//!
//! *What is not*: no guest runs. Each access walks the stage-2 table in software; nothing is kept in
//! a TLB, so invalidations and barriers other than for caches are counted and cost nothing, and a
//! fault costs a function call instead of an exception. The host's own memory is populated
//! beforehand, in base pages or whatever it likes; a backing only says how large a piece of memory
//! the fault path finds. Instructions are looked at, not executed. So compare policies here, not
//! machines, and take no time for that of any CPU.

mod memory;
mod operations;
mod shared;
pub mod simulate;
#[cfg(test)]
mod tests;
mod vcpu;

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use granule_stage2::{
    Features, Ipa, MapError, PhysAddr, Policy, Stage2, UnknownPolicy,
    epoch::EpochReclaim,
    fault::Mmu,
    geometry::{Geometry, Granule},
    operations::Vmid,
    pool::{TablePool, words},
};
use thiserror::Error;

use crate::{
    arch::cache::Cleaner,
    machine::{Machine, MachineError, Region, Vcpu},
    vcpu_threads::clock,
};
use granule_types::{
    backing::Backing,
    host::FactsError,
    record::{EventCounts, Host, Obtained, Series},
    units::{Bytes, GuestAddress, Nanoseconds},
};
use memory::Memory;
use operations::CpuOperations;
use shared::Shared;
use vcpu::ModelVcpu;

/// The policy where none is named.
pub const DEFAULT_POLICY: &str = "granule";

/// Where the region begins: any place that the largest block is aligned at.
const START: u64 = 1 << 32;

const PAGE: u64 = 4096;

/// A software machine to be made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelConfig {
    /// How large pieces the host's memory comes in.
    pub backing: Backing,
    /// The region's size; rounded up to the backing's page.
    pub memory: Bytes,
    /// How many vCPUs, at least one.
    pub vcpus: u32,
    /// The engine's policy: a preset's name.
    pub policy: String,
}

/// More than any host's KVM gives; each takes a thread, or a stack of its own.
const MOST_VCPUS: u32 = 4096;

impl ModelConfig {
    /// Checks what can be checked before a machine is made.
    ///
    /// # Errors
    /// There is no machine with so much memory or so many vCPUs.
    pub fn check(&self) -> Result<(), ModelError> {
        size_of(self)?;
        if self.vcpus > MOST_VCPUS {
            return Err(ModelError::Vcpus { vcpus: self.vcpus });
        }
        Ok(())
    }
}

/// Why there is no such machine, or it failed.
#[derive(Debug, Error)]
pub enum ModelError {
    /// The policy's name is none.
    #[error("--policy {name} cannot be had")]
    Policy {
        /// The name.
        name: String,
        /// What can.
        #[source]
        source: UnknownPolicy,
    },
    /// Blocks of the size are not what a table of 4K pages has.
    #[error(
        "{backing} cannot be modelled: stage 2 with 4K pages maps 4K, 2M or 1G at once; use \
         anonymous, anonymous_thp, anonymous_hugetlb_2mb or anonymous_hugetlb_1gb"
    )]
    Backing {
        /// What was asked for.
        backing: Backing,
    },
    /// It does not fit.
    #[error("{size} is too much: a software machine has room for up to 200G")]
    Size {
        /// What was asked for.
        size: Bytes,
    },
    /// There is no room for so many vCPUs.
    #[error("{vcpus} vCPUs are too many: a software machine has up to {MOST_VCPUS}")]
    Vcpus {
        /// How many were asked for.
        vcpus: u32,
    },
    /// The host refuses memory.
    #[error("no {size} of memory could be had from this host; ask for less with -b")]
    Memory {
        /// How much was asked for.
        size: Bytes,
        /// What the host says.
        #[source]
        source: io::Error,
    },
    /// What is known of the host cannot be read.
    #[error("this host cannot be described")]
    Host(#[source] FactsError),
    /// The engine refuses what the machine asks: a defect.
    #[error("the engine refused")]
    Engine(#[source] MapError),
    /// An address outside the region.
    #[error("{0:#x} is outside the region")]
    Outside(u64),
    /// The log is read while it is off.
    #[error("dirty logging is off")]
    NoLog,
}

/// Threads that play vCPUs on a stage-2 table.
#[derive(Debug)]
pub struct ModelMachine {
    shared: Arc<Shared>,
    ops: CpuOperations,
    host: Host,
    vcpus: usize,
}

impl ModelMachine {
    /// Makes the machine and populates its memory.
    ///
    /// # Errors
    /// What was asked for cannot be had; the error says what and what to do.
    pub fn new(config: &ModelConfig) -> Result<Self, ModelError> {
        config.check()?;
        let policy: Policy = config.policy.parse().map_err(|source| ModelError::Policy {
            name: config.policy.clone(),
            source,
        })?;
        let page = page_of(config.backing)?;
        let size = size_of(config)?;
        let too_large = ModelError::Size {
            size: config.memory,
        };
        let no_memory = |source| ModelError::Memory {
            size: Bytes(size),
            source,
        };
        let index = |n: u64| usize::try_from(n).unwrap_or(usize::MAX);
        let memory = Memory::new(index(size), 1 << 30).map_err(no_memory)?;
        let Ok(geometry) = Geometry::new(Granule::K4, 40) else {
            return Err(too_large);
        };
        let tables = tables_for(size, index(config.vcpus.into()));
        let pool = TablePool::new(
            PhysAddr(1 << 46),
            &geometry,
            words(tables * 512),
            words(tables * 2),
        )
        .ok_or(too_large)?;
        let features = Features::default();
        let cpus = index(config.vcpus.into());
        let table = Stage2::new(geometry, features, policy, Vmid(1), pool.root());
        let cleaner = Cleaner::of_this_cpu();
        let shared = Arc::new(Shared {
            memory,
            cleaner,
            pool,
            // One more for the host's own thread.
            reclaim: EpochReclaim::new(cpus + 1),
            mmu: Mmu::new(table),
            start: START,
            size,
            backing_page: page,
            logging: AtomicBool::new(false),
            dirty: words(index(size / PAGE).div_ceil(64)),
            sequence: AtomicU64::new(0),
            frees: AtomicU64::new(0),
            counts: Default::default(),
        });
        let found = Host::of_this_machine().map_err(ModelError::Host)?;
        Ok(Self {
            ops: CpuOperations::new(Arc::clone(&shared), cpus),
            host: Host {
                // The policy is what differs from one run to another, as a series does.
                series: Some(vec![Series {
                    name: format!("model:{}", config.policy),
                    patches: 0,
                }]),
                // Its time is this machine's own, not an emulator's.
                emulator: None,
                features: no_features(),
                page_size: Some(Bytes(PAGE)),
                ..found
            },
            shared,
            vcpus: cpus,
        })
    }
}

/// The size of a backing's pieces.
fn page_of(backing: Backing) -> Result<u64, ModelError> {
    match backing {
        Backing::Anonymous | Backing::Shmem => Ok(PAGE),
        Backing::AnonymousThp | Backing::AnonymousHugetlb(None) | Backing::SharedHugetlb => {
            Ok(2 << 20)
        }
        Backing::AnonymousHugetlb(Some(size)) if size == Bytes::mib(2) || size == Bytes::gib(1) => {
            Ok(size.0)
        }
        Backing::AnonymousHugetlb(_) => Err(ModelError::Backing { backing }),
    }
}

/// The region's size: whole pages of the backing.
fn size_of(config: &ModelConfig) -> Result<u64, ModelError> {
    let page = page_of(config.backing)?;
    match config.memory.checked_align_up(Bytes(page)) {
        Some(size) if size <= Bytes::gib(200) => Ok(size.0),
        _ => Err(ModelError::Size {
            size: config.memory,
        }),
    }
}

/// Tables that may be in use: every 2M may have its own, as many again may wait for their grace
/// period, and every vCPU has some in hand.
fn tables_for(size: u64, vcpus: usize) -> usize {
    let ranges = 2 * (size >> 21) + 2 * (size >> 30) + 64;
    usize::try_from(ranges).unwrap_or(usize::MAX) + 48 * vcpus
}

/// CPUs without the features that would spare them work.
fn no_features() -> std::collections::BTreeMap<String, u64> {
    [("bbm", 0), ("dic", 0), ("fwb", 0), ("tlbirange", 0)]
        .map(|(name, value)| (name.to_owned(), value))
        .into()
}

/// The time that something takes, its error told with what was being done.
fn timed(
    doing: &'static str,
    act: impl FnOnce() -> Result<(), ModelError>,
) -> Result<Nanoseconds, MachineError> {
    let start = clock::now();
    let result = act();
    let spent = clock::between(start, clock::now());
    result.map_err(|error| MachineError::new(doing, error))?;
    Ok(spent)
}

impl Machine for ModelMachine {
    fn host(&self) -> &Host {
        &self.host
    }

    fn engine(&self) -> &'static str {
        "model"
    }

    fn region(&self) -> Region {
        Region {
            start: GuestAddress(self.shared.start),
            size: Bytes(self.shared.size),
            host_page: Bytes(PAGE),
            backing_page: Bytes(self.shared.backing_page),
            host_address: Some(self.shared.memory.address()),
        }
    }

    fn take_vcpus(&mut self) -> Vec<Box<dyn Vcpu>> {
        assert!(self.vcpus > 0, "the vCPUs were taken before");
        (0..std::mem::take(&mut self.vcpus))
            .map(|index| Box::new(ModelVcpu::new(index, Arc::clone(&self.shared))) as Box<dyn Vcpu>)
            .collect()
    }

    /// The pieces that the fault path finds; what the host really uses is not looked at.
    fn obtained(&self) -> Result<Obtained, MachineError> {
        Ok(Obtained {
            resident: [(self.shared.backing_page, self.shared.size)].into(),
        })
    }

    fn set_dirty_logging(&mut self, on: bool) -> Result<Nanoseconds, MachineError> {
        let shared = &self.shared;
        timed("switching dirty logging", || {
            shared
                .mmu
                .exclusive(&self.ops, |table| {
                    shared.sequence.fetch_add(1, Ordering::AcqRel);
                    shared.logging.store(on, Ordering::Release);
                    if on {
                        for word in &shared.dirty {
                            word.store(0, Ordering::Relaxed);
                        }
                        table.write_protect(&self.ops, Ipa(shared.start), shared.size)
                    } else if table.policy().recover_blocks {
                        let largest = shared.backing_page;
                        table.recover_blocks(&self.ops, Ipa(shared.start), shared.size, largest)
                    } else {
                        Ok(())
                    }
                })
                .map_err(ModelError::Engine)
        })
    }

    fn dirty_log(&mut self) -> Result<Vec<u64>, MachineError> {
        let shared = &self.shared;
        if !shared.logging.load(Ordering::Acquire) {
            return Err(MachineError::new(
                "reading the dirty log",
                ModelError::NoLog,
            ));
        }
        let read = |table: &mut Stage2| {
            let log = shared
                .dirty
                .iter()
                .map(|word| word.swap(0, Ordering::Relaxed))
                .collect();
            table.write_protect(&self.ops, Ipa(shared.start), shared.size)?;
            Ok(log)
        };
        shared
            .mmu
            .exclusive(&self.ops, read)
            .map_err(|error| MachineError::new("reading the dirty log", ModelError::Engine(error)))
    }

    fn drop_backing(&mut self) -> Result<Nanoseconds, MachineError> {
        let shared = &self.shared;
        timed("dropping the memory under test", || {
            self.ops.drain();
            shared
                .mmu
                .exclusive(&self.ops, |table| {
                    shared.sequence.fetch_add(1, Ordering::AcqRel);
                    table.unmap(&self.ops, Ipa(shared.start), shared.size)
                })
                .map_err(ModelError::Engine)?;
            shared
                .memory
                .discard()
                .map_err(|source| ModelError::Memory {
                    size: Bytes(shared.size),
                    source,
                })
        })
    }

    fn restore_backing(&mut self) -> Result<(), MachineError> {
        self.shared
            .memory
            .populate()
            .map_err(|error| MachineError::new("populating the memory under test", error))
    }

    fn read_u64(&self, address: GuestAddress) -> Result<u64, MachineError> {
        let shared = &self.shared;
        let offset = address
            .0
            .checked_sub(shared.start)
            .filter(|at| *at < shared.size && at.is_multiple_of(8))
            .and_then(|at| usize::try_from(at).ok())
            .ok_or_else(|| {
                MachineError::new("reading guest memory", ModelError::Outside(address.0))
            })?;
        Ok(shared.memory.word(offset).load(Ordering::Relaxed))
    }

    fn events(&mut self) -> Result<EventCounts, MachineError> {
        Ok(self.shared.events())
    }

    fn gauges(&mut self) -> Result<EventCounts, MachineError> {
        Ok(EventCounts::new())
    }
}
