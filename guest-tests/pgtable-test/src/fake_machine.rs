// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A fake machine for tests of the harness and the vCPU threads: its vCPUs access words in a map,
//! with at most one injected defect.

use std::{
    collections::BTreeMap,
    mem,
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use crate::{
    machine::{Kick, Machine, MachineError, MigrationOps, Region, TestVcpu, VcpuFailure},
    task::{RandomWalk, Task, TaskAccess},
};
use granule_types::{
    record::{EventCounts, HostInfo, ResidentPages},
    units::{Bytes, GuestAddress, HostVirtAddr, Nanoseconds},
};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Defect {
    None,
    /// Number of a vCPU that runs until it is kicked.
    Hangs(usize),
    /// Number of a vCPU that runs although it is kicked.
    IgnoresKicks(usize),
    /// Number of a vCPU that fails immediately; the others hang.
    Fails(usize),
    Panics(usize),
    CannotBind(usize),
    LosesWrite(u64),
    /// Host page that the dirty bitmap never contains.
    LosesDirtyBit(usize),
    /// Failure to collect the dirty bitmap while the vCPUs run.
    FailsCollection,
    /// Number of bytes that the host backs with small pages instead of backing pages.
    UsesSmallPages(u64),
}

/// Memory of the machine, with a log of tasks and host calls.
#[derive(Debug, Default)]
pub(crate) struct FakeMemory {
    /// Written words by address; other words read as zero.
    words: BTreeMap<u64, u64>,
    dirty_bitmap: Option<Vec<u64>>,
    write_count: u64,
    is_stop_requested: bool,
    write_counts: Vec<u64>,
    /// Executed tasks, each with its vCPU.
    pub(crate) tasks: Vec<(usize, Task)>,
    pub(crate) host_calls: Vec<&'static str>,
}

impl FakeMemory {
    fn word(&self, address: u64) -> u64 {
        self.words.get(&address).copied().unwrap_or(0)
    }

    /// Changes a word without setting its page's bit in the dirty bitmap.
    pub(crate) fn write_untracked(&mut self, address: u64, value: u64) {
        self.words.insert(address, value);
    }
}

#[derive(Debug)]
pub(crate) struct FakeState {
    region: Region,
    defect: Defect,
    memory: Mutex<FakeMemory>,
}

impl FakeState {
    pub(crate) fn memory(&self) -> MutexGuard<'_, FakeMemory> {
        self.memory.lock().unwrap()
    }

    fn write(&self, address: u64, value: u64) {
        let mut memory = self.memory();
        memory.write_count += 1;
        if self.defect != Defect::LosesWrite(address) {
            memory.write_untracked(address, value);
        }
        let page = (address - self.region.start.0) / self.region.host_page_size.0;
        let page = usize::try_from(page).unwrap();
        if let Some(log) = memory.dirty_bitmap.as_mut()
            && self.defect != Defect::LosesDirtyBit(page)
        {
            log[page / 64] |= 1 << (page % 64);
        }
    }
}

#[derive(Debug)]
pub(crate) struct FakeMachine {
    host: HostInfo,
    pub(crate) state: Arc<FakeState>,
    vcpus: usize,
}

impl FakeMachine {
    /// Creates a machine with a region of four backing pages.
    pub(crate) fn new(vcpus: usize, backing_page_size: Bytes, defect: Defect) -> Self {
        let region = Region {
            start: GuestAddress(0x10_0000),
            size: Bytes(4 * backing_page_size.0),
            host_page_size: Bytes::kib(4),
            backing_page_size,
            host_address: HostVirtAddr(0),
        };
        let memory =
            Mutex::new(FakeMemory { write_counts: vec![0; vcpus], ..FakeMemory::default() });
        let state = Arc::new(FakeState { region, defect, memory });
        Self { host: HostInfo::default(), state, vcpus }
    }
}

/// Number of random writes of a vCPU after the request to stop, large enough that every vCPU writes
/// to every page of the region under any schedule.
const WRITES_AFTER_STOP: u32 = 5000;

struct FakeVcpu {
    index: usize,
    state: Arc<FakeState>,
    is_kicked: Arc<AtomicBool>,
}

impl FakeVcpu {
    fn failure(&self, exit: &str) -> VcpuFailure {
        VcpuFailure {
            pc: Some(0x1000 + self.index as u64),
            ..VcpuFailure::new(self.index, exit, "injected defect")
        }
    }

    /// Writes until the request to stop, then [`WRITES_AFTER_STOP`] more times.
    fn write_at_random(&self, task: &Task) -> Result<(), VcpuFailure> {
        let mut remaining = WRITES_AFTER_STOP;
        for (write, page) in (1..).zip(RandomWalk::new(task.seed, task.count)) {
            if self.is_kicked.load(Ordering::Relaxed) {
                return Err(self.failure("KICKED"));
            }
            self.state.write(task.start.0 + page * task.stride.0, write);
            let mut memory = self.state.memory();
            memory.write_counts[self.index] = write;
            if memory.is_stop_requested {
                remaining -= 1;
            }
            if remaining == 0 {
                break;
            }
        }
        Ok(())
    }

    fn run_until_kicked(&self) -> Result<(), VcpuFailure> {
        while !self.is_kicked.load(Ordering::SeqCst) {
            thread::sleep(Duration::from_millis(1));
        }
        Err(self.failure("KICKED"))
    }
}

impl TestVcpu for FakeVcpu {
    fn bind(&mut self) -> Result<Box<dyn Kick>, MachineError> {
        if self.state.defect == Defect::CannotBind(self.index) {
            return Err(MachineError::new("pinning", "no such CPU"));
        }
        Ok(Box::new(self.is_kicked.clone()))
    }

    fn run(&mut self, task: &Task) -> Result<(), VcpuFailure> {
        match self.state.defect {
            Defect::Hangs(vcpu) if vcpu == self.index => return self.run_until_kicked(),
            Defect::IgnoresKicks(vcpu) if vcpu == self.index => loop {
                thread::park();
            },
            Defect::Fails(vcpu) if vcpu == self.index => return Err(self.failure("FAILED")),
            Defect::Fails(_) => return self.run_until_kicked(),
            Defect::Panics(vcpu) if vcpu == self.index => {
                // Skips the panic hook, whose backtrace may exceed the test's deadline.
                std::panic::resume_unwind(Box::new("injected defect"))
            }
            _ => {}
        }
        self.state.memory().tasks.push((self.index, *task));
        if task.access == TaskAccess::WriteAtRandom {
            return self.write_at_random(task);
        }
        for GuestAddress(address) in task.addresses() {
            let value = Task::value_at(task.seed, GuestAddress(address));
            match task.access {
                TaskAccess::Write | TaskAccess::WriteThenRead => self.state.write(address, value),
                TaskAccess::Verify if self.state.memory().word(address) != value => {
                    return Err(self.failure("VERIFY"));
                }
                _ => {}
            }
        }
        Ok(())
    }
}

impl Machine for FakeMachine {
    fn host(&self) -> &HostInfo {
        &self.host
    }

    fn engine(&self) -> &'static str {
        "fake"
    }

    fn region(&self) -> Region {
        self.state.region
    }

    fn take_vcpus(&mut self) -> Vec<Box<dyn TestVcpu>> {
        (0..mem::take(&mut self.vcpus))
            .map(|index| {
                Box::new(FakeVcpu { index, state: self.state.clone(), is_kicked: Arc::default() })
                    as Box<dyn TestVcpu>
            })
            .collect()
    }

    fn resident_pages(&self) -> Result<ResidentPages, MachineError> {
        let region = self.state.region;
        let mut resident = BTreeMap::from([(region.backing_page_size.0, region.size.0)]);
        if let Defect::UsesSmallPages(small) = self.state.defect {
            resident.insert(region.backing_page_size.0, region.size.0 - small);
            resident.insert(region.host_page_size.0, small);
        }
        Ok(ResidentPages { resident_bytes: resident })
    }

    fn set_dirty_logging(&mut self, on: bool) -> Result<Nanoseconds, MachineError> {
        let region = self.state.region;
        let pages = usize::try_from(region.size.0 / region.host_page_size.0).unwrap();
        let mut memory = self.state.memory();
        memory.dirty_bitmap = on.then(|| vec![0; pages.div_ceil(64)]);
        memory.host_calls.push(if on { "log on" } else { "log off" });
        Ok(Nanoseconds(11))
    }

    fn dirty_log(&mut self) -> Result<Vec<u64>, MachineError> {
        let log = self.state.memory().dirty_bitmap.clone();
        log.ok_or_else(|| MachineError::new("reading the dirty bitmap", "logging is off"))
    }

    fn drop_backing(&mut self) -> Result<Nanoseconds, MachineError> {
        let mut memory = self.state.memory();
        memory.words.clear();
        memory.host_calls.push("drop");
        Ok(Nanoseconds(13))
    }

    fn restore_backing(&mut self) -> Result<(), MachineError> {
        self.state.memory().host_calls.push("restore");
        Ok(())
    }

    fn read_u64(&self, address: GuestAddress) -> Result<u64, MachineError> {
        Ok(self.state.memory().word(address.0))
    }

    fn events(&mut self) -> Result<EventCounts, MachineError> {
        Ok([("writes".to_owned(), self.state.memory().write_count)].into())
    }

    fn migration_ops(&mut self) -> Option<&mut dyn MigrationOps> {
        Some(self)
    }
}

impl MigrationOps for FakeMachine {
    fn set_stop_request(&mut self, stop: bool) -> Result<(), MachineError> {
        let mut memory = self.state.memory();
        if !stop {
            memory.write_counts.fill(0);
        }
        memory.is_stop_requested = stop;
        Ok(())
    }

    fn write_counts(&self) -> Result<Vec<u64>, MachineError> {
        Ok(self.state.memory().write_counts.clone())
    }

    fn collect_dirty_log(&mut self) -> Result<Vec<u64>, MachineError> {
        if self.state.defect == Defect::FailsCollection {
            return Err(MachineError::new("reading the dirty bitmap", "injected defect"));
        }
        let mut memory = self.state.memory();
        let log = memory.dirty_bitmap.as_mut().expect("logging is on");
        let empty = vec![0; log.len()];
        Ok(mem::replace(log, empty))
    }

    fn read(&self, address: GuestAddress, buffer: &mut [u8]) -> Result<(), MachineError> {
        let memory = self.state.memory();
        for (address, word) in (address.0..).step_by(8).zip(buffer.chunks_exact_mut(8)) {
            word.copy_from_slice(&memory.word(address).to_le_bytes());
        }
        Ok(())
    }
}
