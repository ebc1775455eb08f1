// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A machine for the tests of harness and vCPU threads: vCPUs that access a vector, with one
//! injected defect at a time.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::Duration,
};

use crate::{
    machine::{Kick, Machine, MachineError, MigrationOps, Region, Vcpu, VcpuFailure},
    task::{Access, RandomWalk, Task},
};
use granule_types::{
    record::{EventCounts, Host, ResidentPages},
    units::{Bytes, GuestAddress, Nanoseconds},
};

/// The injected defect.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Defect {
    None,
    /// This vCPU runs until it is kicked.
    Hangs(usize),
    /// This vCPU fails at once; the others hang.
    Fails(usize),
    /// The thread of this vCPU panics.
    Panics(usize),
    /// This vCPU cannot be bound.
    CannotBind(usize),
    /// Writes to this address are lost.
    LosesWrite(u64),
    /// The dirty bitmap misses this host page.
    LosesDirty(usize),
    /// Collecting the dirty bitmap fails while the vCPUs run.
    RefusesLog,
    /// The host backs this many bytes with small pages instead.
    FallsBack(u64),
}

#[derive(Debug)]
pub(crate) struct FakeState {
    pub(crate) region: Region,
    words: Vec<AtomicU64>,
    dirty: Mutex<Option<Vec<u64>>>,
    events: AtomicU64,
    stopping: AtomicBool,
    writes: Vec<AtomicU64>,
    defect: Defect,
    /// Every executed task, with its vCPU.
    pub(crate) log: Mutex<Vec<(usize, Task)>>,
    /// Calls of the harness to the host.
    pub(crate) calls: Mutex<Vec<&'static str>>,
}

#[derive(Debug)]
pub(crate) struct FakeMachine {
    host: Host,
    pub(crate) state: Arc<FakeState>,
    vcpus: usize,
}

impl FakeMachine {
    /// Makes a machine with a region of four backing pages.
    pub(crate) fn new(vcpus: usize, backing_page: Bytes, defect: Defect) -> Self {
        let region = Region {
            start: GuestAddress(0x10_0000),
            size: Bytes(4 * backing_page.0),
            host_page: Bytes::kib(4),
            backing_page,
            host_address: None,
        };
        let words = usize::try_from(region.size.0 / 8).unwrap();
        let zeroes = |count| (0..count).map(|_| AtomicU64::new(0)).collect();
        Self {
            host: Host::default(),
            state: Arc::new(FakeState {
                region,
                words: zeroes(words),
                dirty: Mutex::default(),
                events: AtomicU64::new(0),
                stopping: AtomicBool::new(false),
                writes: zeroes(vcpus),
                defect,
                log: Mutex::default(),
                calls: Mutex::default(),
            }),
            vcpus,
        }
    }
}

impl FakeState {
    fn word(&self, address: u64) -> &AtomicU64 {
        &self.words[usize::try_from((address - self.region.start.0) / 8).unwrap()]
    }

    /// Changes a word without a trace in the dirty bitmap.
    pub(crate) fn poke(&self, address: u64, value: u64) {
        self.word(address).store(value, Ordering::Relaxed);
    }

    fn write(&self, address: u64, value: u64) {
        self.events.fetch_add(1, Ordering::Relaxed);
        if self.defect != Defect::LosesWrite(address) {
            self.word(address).store(value, Ordering::Relaxed);
        }
        let page = usize::try_from((address - self.region.start.0) / self.region.host_page.0);
        let page = page.unwrap();
        if self.defect == Defect::LosesDirty(page) {
            return;
        }
        if let Some(log) = self.dirty.lock().unwrap().as_mut() {
            log[page / 64] |= 1 << (page % 64);
        }
    }
}

/// Number of random writes of a vCPU after it is asked to stop: enough to reach every page of the
/// region, however the threads are scheduled.
const LAST_WRITES: u32 = 5000;

struct FakeVcpu {
    index: usize,
    state: Arc<FakeState>,
    kicked: Arc<AtomicBool>,
}

impl FakeVcpu {
    fn failure(&self, exit: &str) -> VcpuFailure {
        VcpuFailure {
            pc: Some(0x1000 + self.index as u64),
            ..VcpuFailure::new(self.index, exit, "injected defect")
        }
    }

    /// Writes until asked to stop, and [`LAST_WRITES`] times more.
    fn write_at_random(&self, task: &Task) -> Result<(), VcpuFailure> {
        let mut left = LAST_WRITES;
        for (write, page) in (1..).zip(RandomWalk::new(task.seed, task.count)) {
            if self.state.stopping.load(Ordering::Acquire) {
                left -= 1;
            }
            if self.kicked.load(Ordering::Relaxed) {
                return Err(self.failure("KICKED"));
            }
            let address = task.start.0 + page * task.stride.0;
            self.state.write(address, write);
            self.state.writes[self.index].store(write, Ordering::Relaxed);
            if left == 0 {
                break;
            }
        }
        Ok(())
    }

    fn hang(&self) -> VcpuFailure {
        while !self.kicked.load(Ordering::SeqCst) {
            thread::sleep(Duration::from_millis(1));
        }
        self.failure("KICKED")
    }
}

impl Vcpu for FakeVcpu {
    fn bind(&mut self) -> Result<Box<dyn Kick>, MachineError> {
        if self.state.defect == Defect::CannotBind(self.index) {
            return Err(MachineError::new("pinning", "no such CPU"));
        }
        Ok(Box::new(self.kicked.clone()))
    }

    fn run(&mut self, task: &Task) -> Result<(), VcpuFailure> {
        match self.state.defect {
            Defect::Hangs(vcpu) if vcpu == self.index => return Err(self.hang()),
            Defect::Fails(vcpu) if vcpu == self.index => return Err(self.failure("FAILED")),
            Defect::Fails(_) => return Err(self.hang()),
            Defect::Panics(vcpu) if vcpu == self.index => {
                // Without the panic hook, whose backtrace may take longer than the test's deadline.
                std::panic::resume_unwind(Box::new("injected defect"))
            }
            _ => {}
        }
        self.state.log.lock().unwrap().push((self.index, *task));
        if task.access == Access::WriteAtRandom {
            return self.write_at_random(task);
        }
        for visit in 0..task.count {
            let address = task.start.0 + visit * task.stride.0;
            let value = Task::value_at(task.seed, GuestAddress(address));
            match task.access {
                Access::Write | Access::WriteThenRead => {
                    self.state.write(address, value);
                }
                Access::Verify if self.state.word(address).load(Ordering::Relaxed) != value => {
                    return Err(self.failure("VERIFY"));
                }
                _ => {}
            }
        }
        Ok(())
    }
}

impl Machine for FakeMachine {
    fn host(&self) -> &Host {
        &self.host
    }

    fn engine(&self) -> &'static str {
        "fake"
    }

    fn region(&self) -> Region {
        self.state.region
    }

    fn take_vcpus(&mut self) -> Vec<Box<dyn Vcpu>> {
        (0..std::mem::take(&mut self.vcpus))
            .map(|index| {
                Box::new(FakeVcpu { index, state: self.state.clone(), kicked: Arc::default() })
                    as Box<dyn Vcpu>
            })
            .collect()
    }

    fn obtained(&self) -> Result<ResidentPages, MachineError> {
        let region = self.state.region;
        let mut resident = BTreeMap::from([(region.backing_page.0, region.size.0)]);
        if let Defect::FallsBack(small) = self.state.defect {
            resident.insert(region.backing_page.0, region.size.0 - small);
            resident.insert(region.host_page.0, small);
        }
        Ok(ResidentPages { resident })
    }

    fn set_dirty_logging(&mut self, on: bool) -> Result<Nanoseconds, MachineError> {
        let region = self.state.region;
        let pages = usize::try_from(region.size.0 / region.host_page.0).unwrap();
        *self.state.dirty.lock().unwrap() = on.then(|| vec![0; pages.div_ceil(64)]);
        let call = if on { "log on" } else { "log off" };
        self.state.calls.lock().unwrap().push(call);
        Ok(Nanoseconds(11))
    }

    fn dirty_log(&mut self) -> Result<Vec<u64>, MachineError> {
        let log = self.state.dirty.lock().unwrap().clone();
        log.ok_or_else(|| MachineError::new("reading the dirty bitmap", "logging is off"))
    }

    fn drop_backing(&mut self) -> Result<Nanoseconds, MachineError> {
        for word in &self.state.words {
            word.store(0, Ordering::Relaxed);
        }
        self.state.calls.lock().unwrap().push("drop");
        Ok(Nanoseconds(13))
    }

    fn restore_backing(&mut self) -> Result<(), MachineError> {
        self.state.calls.lock().unwrap().push("restore");
        Ok(())
    }

    fn read_u64(&self, address: GuestAddress) -> Result<u64, MachineError> {
        Ok(self.state.word(address.0).load(Ordering::Relaxed))
    }

    fn events(&mut self) -> Result<EventCounts, MachineError> {
        let writes = self.state.events.load(Ordering::Relaxed);
        Ok([("writes".to_owned(), writes)].into())
    }

    fn migration_ops(&mut self) -> Option<&mut dyn MigrationOps> {
        Some(self)
    }
}

impl MigrationOps for FakeMachine {
    fn set_stopping(&mut self, stop: bool) -> Result<(), MachineError> {
        if !stop {
            let writes = self.state.writes.iter();
            writes.for_each(|count| count.store(0, Ordering::Relaxed));
        }
        self.state.stopping.store(stop, Ordering::Release);
        Ok(())
    }

    fn writes(&self) -> Result<Vec<u64>, MachineError> {
        let writes = self.state.writes.iter();
        Ok(writes.map(|count| count.load(Ordering::Relaxed)).collect())
    }

    fn collect_dirty_log(&mut self) -> Result<Vec<u64>, MachineError> {
        if self.state.defect == Defect::RefusesLog {
            let doing = "reading the dirty bitmap";
            return Err(MachineError::new(doing, "injected defect"));
        }
        let mut dirty = self.state.dirty.lock().unwrap();
        let log = dirty.as_mut().expect("logging is on");
        let empty = vec![0; log.len()];
        Ok(std::mem::replace(log, empty))
    }

    fn read(&self, address: GuestAddress, into: &mut [u8]) -> Result<(), MachineError> {
        for (at, word) in (address.0..).step_by(8).zip(into.chunks_exact_mut(8)) {
            let value = self.state.word(at).load(Ordering::Relaxed);
            word.copy_from_slice(&value.to_le_bytes());
        }
        Ok(())
    }
}
