// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A machine for the tests of crew and harness alone: vCPUs that are threads walking a vector, with
//! one defect at a time. It measures nothing and is in no product.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Condvar, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use crate::{
    guest::random_walk::RandomWalk as Places,
    machine::{Access, Kick, Live, Machine, MachineError, Region, Task, Vcpu, VcpuFailure},
};
use granule_types::{
    record::{EventCounts, Host, Obtained},
    units::{Bytes, GuestAddress, Nanoseconds},
};

/// What is wrong with a toy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Defect {
    None,
    /// This vCPU does not come out until it is kicked.
    Hangs(usize),
    /// This vCPU fails at once; the others hang.
    Fails(usize),
    /// This vCPU's thread panics.
    Panics(usize),
    /// This vCPU cannot be bound.
    CannotBind(usize),
    /// Writes of this address are lost.
    LosesWrite(u64),
    /// The log has no bit for this host page.
    LosesDirty(usize),
    /// The log cannot be collected while the vCPUs run.
    RefusesLog,
    /// The host backs this many bytes with small pages instead.
    FallsBack(u64),
}

#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) region: Region,
    words: Vec<AtomicU64>,
    dirty: Mutex<Option<Vec<u64>>>,
    events: AtomicU64,
    stopping: AtomicBool,
    writes: Vec<AtomicU64>,
    defect: Defect,
    /// Every task that was run, with its vCPU.
    pub(crate) log: Mutex<Vec<(usize, Task)>>,
    /// What the harness asked the host to do.
    pub(crate) calls: Mutex<Vec<&'static str>>,
}

#[derive(Debug)]
pub(crate) struct Toy {
    host: Host,
    pub(crate) shared: Arc<Shared>,
    vcpus: usize,
}

impl Toy {
    /// Four backing pages.
    pub(crate) fn new(vcpus: usize, backing_page: Bytes, defect: Defect) -> Self {
        let region = Region {
            start: GuestAddress(0x10_0000),
            size: Bytes(4 * backing_page.0),
            host_page: Bytes::kib(4),
            backing_page,
            host_address: None,
        };
        let words = usize::try_from(region.size.0 / 8).unwrap();
        Self {
            host: Host::default(),
            shared: Arc::new(Shared {
                region,
                words: (0..words).map(|_| AtomicU64::new(0)).collect(),
                dirty: Mutex::new(None),
                events: AtomicU64::new(0),
                stopping: AtomicBool::new(false),
                writes: (0..vcpus).map(|_| AtomicU64::new(0)).collect(),
                defect,
                log: Mutex::new(Vec::new()),
                calls: Mutex::new(Vec::new()),
            }),
            vcpus,
        }
    }
}

impl Shared {
    fn word(&self, address: u64) -> &AtomicU64 {
        &self.words[usize::try_from((address - self.region.start.0) / 8).unwrap()]
    }

    /// Changes a word behind everybody's back.
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

/// How often a vCPU writes at random after it was told to stop: enough to reach every page of a toy,
/// whatever the scheduler does.
const LAST_WRITES: u32 = 5000;

struct ToyVcpu {
    index: usize,
    shared: Arc<Shared>,
    kicked: Arc<ToyKick>,
}

#[derive(Default)]
struct ToyKick {
    kicked: AtomicBool,
    lock: Mutex<()>,
    wake: Condvar,
}

impl Kick for Arc<ToyKick> {
    fn kick(&self) {
        self.kicked.store(true, Ordering::SeqCst);
        let _lock = self.lock.lock().unwrap();
        self.wake.notify_all();
    }
}

impl ToyVcpu {
    fn failure(&self, exit: &str) -> VcpuFailure {
        VcpuFailure {
            vcpu: self.index,
            pc: Some(0x1000 + self.index as u64),
            exit: exit.to_owned(),
            syndrome: None,
            address: None,
            detail: "as the test asked".to_owned(),
        }
    }

    /// Until it is told to stop, and [`LAST_WRITES`] more.
    fn write_at_random(&self, task: &Task) -> Result<(), VcpuFailure> {
        let mut left = LAST_WRITES;
        for (write, place) in (1..).zip(Places::new(task.seed, task.count)) {
            if self.shared.stopping.load(Ordering::Acquire) {
                left -= 1;
            }
            if self.kicked.kicked.load(Ordering::Relaxed) {
                return Err(self.failure("KICKED"));
            }
            let address = task.start.0 + place * task.stride.0;
            self.shared.write(address, write);
            self.shared.writes[self.index].store(write, Ordering::Relaxed);
            if left == 0 {
                break;
            }
        }
        Ok(())
    }

    fn hang(&self) -> VcpuFailure {
        let mut lock = self.kicked.lock.lock().unwrap();
        while !self.kicked.kicked.load(Ordering::SeqCst) {
            lock = self
                .kicked
                .wake
                .wait_timeout(lock, Duration::from_millis(50))
                .unwrap()
                .0;
        }
        self.failure("KICKED")
    }
}

impl Vcpu for ToyVcpu {
    fn bind(&mut self) -> Result<Box<dyn Kick>, MachineError> {
        if self.shared.defect == Defect::CannotBind(self.index) {
            return Err(MachineError::new("pinning", "no such CPU"));
        }
        Ok(Box::new(self.kicked.clone()))
    }

    fn run(&mut self, task: &Task) -> Result<(), VcpuFailure> {
        match self.shared.defect {
            Defect::Hangs(vcpu) if vcpu == self.index => return Err(self.hang()),
            Defect::Fails(vcpu) if vcpu == self.index => return Err(self.failure("FAILED")),
            Defect::Fails(_) => return Err(self.hang()),
            Defect::Panics(vcpu) if vcpu == self.index => {
                // Without the hook, whose backtrace may take longer than the test waits.
                std::panic::resume_unwind(Box::new("as the test asked"))
            }
            _ => {}
        }
        self.shared.log.lock().unwrap().push((self.index, *task));
        if task.access == Access::WriteAtRandom {
            return self.write_at_random(task);
        }
        for place in 0..task.count {
            let address = task.start.0 + place * task.stride.0;
            let value = Task::value_at(task.seed, GuestAddress(address));
            match task.access {
                Access::Write | Access::WriteThenRead => {
                    self.shared.write(address, value);
                }
                Access::Verify if self.shared.word(address).load(Ordering::Relaxed) != value => {
                    return Err(self.failure("VERIFY"));
                }
                _ => {}
            }
        }
        Ok(())
    }
}

impl Machine for Toy {
    fn host(&self) -> &Host {
        &self.host
    }

    fn engine(&self) -> &'static str {
        "toy"
    }

    fn region(&self) -> Region {
        self.shared.region
    }

    fn take_vcpus(&mut self) -> Vec<Box<dyn Vcpu>> {
        (0..std::mem::take(&mut self.vcpus))
            .map(|index| {
                Box::new(ToyVcpu {
                    index,
                    shared: self.shared.clone(),
                    kicked: Arc::default(),
                }) as Box<dyn Vcpu>
            })
            .collect()
    }

    fn obtained(&self) -> Result<Obtained, MachineError> {
        let region = self.shared.region;
        let small = match self.shared.defect {
            Defect::FallsBack(bytes) => bytes,
            _ => 0,
        };
        let mut resident = BTreeMap::from([(region.backing_page.0, region.size.0 - small)]);
        if small > 0 {
            resident.insert(region.host_page.0, small);
        }
        Ok(Obtained { resident })
    }

    fn set_dirty_logging(&mut self, on: bool) -> Result<Nanoseconds, MachineError> {
        let region = self.shared.region;
        let pages = usize::try_from(region.size.0 / region.host_page.0).unwrap();
        *self.shared.dirty.lock().unwrap() = on.then(|| vec![0; pages.div_ceil(64)]);
        let call = if on { "log on" } else { "log off" };
        self.shared.calls.lock().unwrap().push(call);
        Ok(Nanoseconds(11))
    }

    fn dirty_log(&mut self) -> Result<Vec<u64>, MachineError> {
        let log = self.shared.dirty.lock().unwrap().clone();
        log.ok_or_else(|| MachineError::new("reading the log", "logging is off"))
    }

    fn drop_backing(&mut self) -> Result<Nanoseconds, MachineError> {
        for word in &self.shared.words {
            word.store(0, Ordering::Relaxed);
        }
        self.shared.calls.lock().unwrap().push("drop");
        Ok(Nanoseconds(13))
    }

    fn restore_backing(&mut self) -> Result<(), MachineError> {
        self.shared.calls.lock().unwrap().push("restore");
        Ok(())
    }

    fn read_u64(&self, address: GuestAddress) -> Result<u64, MachineError> {
        Ok(self.shared.word(address.0).load(Ordering::Relaxed))
    }

    fn events(&mut self) -> Result<EventCounts, MachineError> {
        let writes = self.shared.events.load(Ordering::Relaxed);
        Ok([("writes".to_owned(), writes)].into())
    }

    fn gauges(&mut self) -> Result<EventCounts, MachineError> {
        Ok(EventCounts::new())
    }

    fn live(&mut self) -> Option<&mut dyn Live> {
        Some(self)
    }
}

impl Live for Toy {
    fn set_stopping(&mut self, stop: bool) -> Result<(), MachineError> {
        let shared = &self.shared;
        if !stop {
            let writes = shared.writes.iter();
            writes.for_each(|count| count.store(0, Ordering::Relaxed));
        }
        shared.stopping.store(stop, Ordering::Release);
        Ok(())
    }

    fn writes(&self) -> Result<Vec<u64>, MachineError> {
        let writes = self.shared.writes.iter();
        Ok(writes.map(|count| count.load(Ordering::Relaxed)).collect())
    }

    fn collect_dirty_log(&mut self) -> Result<Vec<u64>, MachineError> {
        if self.shared.defect == Defect::RefusesLog {
            return Err(MachineError::new("reading the log", "as the test asked"));
        }
        let mut dirty = self.shared.dirty.lock().unwrap();
        let log = dirty.as_mut().expect("logging is on");
        let empty = vec![0; log.len()];
        Ok(std::mem::replace(log, empty))
    }

    fn read(&self, address: GuestAddress, into: &mut [u8]) -> Result<(), MachineError> {
        for (at, word) in (address.0..).step_by(8).zip(into.chunks_exact_mut(8)) {
            let value = self.shared.word(at).load(Ordering::Relaxed);
            word.copy_from_slice(&value.to_le_bytes());
        }
        Ok(())
    }
}
