// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The vCPU threads.
//!
//! All of them look at one [`Wanted`] before they enter the guest: run, stand still, or end. To
//! change it, say so first and then [kick](crate::kvm::kick) every vCPU; a thread forgets kicks
//! before it looks, so it either sees what is wanted or is kicked out again.
//!
//! A vCPU thread that finds the guest at its end (or cannot go on) tells the main thread and then
//! waits like all others: only the main thread ends a machine.

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
        mpsc,
    },
    thread::{self, JoinHandle},
};

use granule_guest_tests::machine::Kick;
use kvm_bindings::{
    KVM_EXIT_ARM_NISV, KVM_EXIT_DIRTY_RING_FULL, KVM_SYSTEM_EVENT_CRASH, KVM_SYSTEM_EVENT_RESET,
    KVM_SYSTEM_EVENT_SHUTDOWN,
};
use kvm_ioctls::{VcpuExit, VcpuFd};
use parking_lot::{Condvar, Mutex};
use vmm_sys_util::eventfd::EventFd;

use crate::{
    devices::Bus,
    kvm::{
        exit,
        kick::{Anchor, Kicker},
        ring::Rings,
    },
};

/// What the vCPUs are to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wanted {
    /// Run the guest.
    Run,
    /// Stand still.
    Pause,
    /// End.
    End,
}

/// How the guest ended, or why it cannot go on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum End {
    /// It switched itself off.
    Off,
    /// It reset itself.
    Reset,
    /// It says that it crashed.
    Crash,
    /// A vCPU cannot go on.
    Stuck(String),
}

/// How often vCPUs left the guest, by reason; what the kernel handles itself is not in it.
#[derive(Debug, Default)]
pub struct Exits {
    /// Loads from devices.
    pub mmio_reads: AtomicU64,
    /// Stores to devices that no ioeventfd took.
    pub mmio_writes: AtomicU64,
    /// Signals.
    pub interrupted: AtomicU64,
    /// Everything else.
    pub other: AtomicU64,
}

/// What all vCPU threads share.
#[derive(Debug)]
struct Shared {
    wanted: Mutex<Gate>,
    changed: Condvar,
    bus: Arc<Bus>,
    rings: Option<Arc<Rings>>,
    exits: Arc<Exits>,
    ended: EventFd,
    size: usize,
}

#[derive(Debug)]
struct Gate {
    wanted: Wanted,
    standing: usize,
}

/// The vCPU threads of a machine. Dropping it ends them.
#[derive(Debug)]
pub struct Crew {
    shared: Arc<Shared>,
    kickers: Vec<Kicker>,
    threads: Vec<JoinHandle<()>>,
    ends: mpsc::Receiver<End>,
    exits: Arc<Exits>,
}

/// What a vCPU thread does before it enters the guest for the first time.
pub type Prepare = Arc<dyn Fn() -> io::Result<()> + Send + Sync>;

impl Crew {
    /// Starts a thread for each vCPU; all stand still until [`Crew::want`] tells them to run.
    /// Where the VM has dirty rings, they are emptied when one is full.
    /// `ended` is written to when [`Crew::end`] has something to say.
    ///
    /// # Errors
    /// A thread cannot be had, or not be prepared.
    pub fn start(
        vcpus: Vec<VcpuFd>,
        bus: Arc<Bus>,
        rings: Option<Arc<Rings>>,
        ended: EventFd,
        prepare: &Prepare,
    ) -> io::Result<Self> {
        let exits = Arc::new(Exits::default());
        let shared = Arc::new(Shared {
            wanted: Mutex::new(Gate {
                wanted: Wanted::Pause,
                standing: 0,
            }),
            changed: Condvar::new(),
            bus,
            rings,
            exits: Arc::clone(&exits),
            ended,
            size: vcpus.len(),
        });
        let (to_main, ends) = mpsc::channel();
        let mut crew = Self {
            shared,
            kickers: Vec::new(),
            threads: Vec::new(),
            ends,
            exits,
        };
        for (index, fd) in vcpus.into_iter().enumerate() {
            let (tied, kicker) = mpsc::sync_channel(1);
            let mut vcpu = Vcpu {
                anchor: Anchor::default(),
                fd,
                index,
                shared: Arc::clone(&crew.shared),
                to_main: to_main.clone(),
            };
            let prepare = Arc::clone(prepare);
            let thread = thread::Builder::new()
                .name(format!("vcpu-{index}"))
                .spawn(move || vcpu.live(&tied, &prepare))?;
            crew.threads.push(thread);
            let kicker = kicker.recv().map_err(|_| {
                io::Error::other(format!("vCPU {index}'s thread ended before it began"))
            })??;
            crew.kickers.push(kicker);
        }
        Ok(crew)
    }

    /// Tells all vCPUs what is wanted.
    pub fn want(&self, wanted: Wanted) {
        let mut gate = self.shared.wanted.lock();
        if gate.wanted == Wanted::End {
            return;
        }
        gate.wanted = wanted;
        drop(gate);
        self.shared.changed.notify_all();
        if wanted != Wanted::Run {
            self.kickers.iter().for_each(Kick::kick);
        }
    }

    /// What was last asked of the vCPUs.
    pub fn wanted(&self) -> Wanted {
        self.shared.wanted.lock().wanted
    }

    /// Tells all vCPUs to stand still and waits until they do.
    pub fn pause(&self) {
        self.want(Wanted::Pause);
        let mut gate = self.shared.wanted.lock();
        while gate.wanted == Wanted::Pause && gate.standing < self.shared.size {
            self.shared.changed.wait(&mut gate);
        }
    }

    /// How the guest ended, if it did.
    pub fn end(&self) -> Option<End> {
        self.ends.try_recv().ok()
    }

    /// How often vCPUs left the guest.
    pub const fn exits(&self) -> &Arc<Exits> {
        &self.exits
    }
}

impl Drop for Crew {
    fn drop(&mut self) {
        self.want(Wanted::End);
        for thread in self.threads.drain(..) {
            // A thread that panicked has said so itself.
            let _ = thread.join();
        }
    }
}

impl Shared {
    /// Waits while the vCPUs are to stand still; what is wanted then.
    fn wait(&self) -> Wanted {
        let mut gate = self.wanted.lock();
        if gate.wanted == Wanted::Pause {
            gate.standing += 1;
            self.changed.notify_all();
            while gate.wanted == Wanted::Pause {
                self.changed.wait(&mut gate);
            }
            gate.standing -= 1;
        }
        gate.wanted
    }
}

/// A vCPU on its thread.
struct Vcpu {
    // Before `fd`: kicks must have become harmless when the vCPU goes.
    anchor: Anchor,
    fd: VcpuFd,
    index: usize,
    shared: Arc<Shared>,
    to_main: mpsc::Sender<End>,
}

impl Drop for Vcpu {
    fn drop(&mut self) {
        if thread::panicking() {
            let why = format!("vCPU {}: its thread panicked", self.index);
            let _ = self.to_main.send(End::Stuck(why));
            let _ = self.shared.ended.write(1);
            let mut gate = self.shared.wanted.lock();
            gate.standing += 1;
            self.shared.changed.notify_all();
        }
    }
}

/// How the guest was left.
enum Left {
    /// For something that is done.
    Handled,
    /// For good.
    Ended(End),
}

impl Vcpu {
    fn live(&mut self, tied: &mpsc::SyncSender<io::Result<Kicker>>, prepare: &Prepare) {
        let kicker = self.anchor.tie(&mut self.fd);
        let ready = kicker.and_then(|kicker| prepare().map(|()| kicker));
        let failed = ready.is_err();
        if tied.send(ready).is_err() || failed {
            return;
        }
        loop {
            self.anchor.settle();
            if self.shared.wait() == Wanted::End {
                return;
            }
            if let Left::Ended(end) = self.enter() {
                // The main thread is there for as long as vCPUs are: it joins them.
                let _ = self.to_main.send(end);
                let _ = self.shared.ended.write(1);
                self.rest();
                return;
            }
        }
    }

    /// Stands still until the machine ends: this vCPU never enters the guest again.
    fn rest(&self) {
        let mut gate = self.shared.wanted.lock();
        gate.standing += 1;
        self.shared.changed.notify_all();
        while gate.wanted != Wanted::End {
            self.shared.changed.wait(&mut gate);
        }
    }

    /// Enters the guest once.
    fn enter(&mut self) -> Left {
        let exits = &self.shared.exits;
        let count = |counter: &AtomicU64| {
            counter.fetch_add(1, Ordering::Relaxed);
        };
        let what = match self.fd.run() {
            Ok(VcpuExit::MmioRead(address, data)) => {
                count(&exits.mmio_reads);
                self.shared.bus.read(address, data);
                return Left::Handled;
            }
            Ok(VcpuExit::MmioWrite(address, data)) => {
                count(&exits.mmio_writes);
                self.shared.bus.write(address, data);
                return Left::Handled;
            }
            Ok(VcpuExit::Unsupported(KVM_EXIT_DIRTY_RING_FULL)) if self.shared.rings.is_some() => {
                count(&exits.other);
                let rings = self.shared.rings.as_ref();
                match rings.map_or(Ok(()), |rings| rings.make_room()) {
                    Ok(()) => return Left::Handled,
                    Err(error) => return Left::Ended(self.stuck(&error.to_string())),
                }
            }
            Ok(VcpuExit::SystemEvent(kind, _)) => {
                count(&exits.other);
                return Left::Ended(match kind {
                    KVM_SYSTEM_EVENT_SHUTDOWN => End::Off,
                    KVM_SYSTEM_EVENT_RESET => End::Reset,
                    KVM_SYSTEM_EVENT_CRASH => End::Crash,
                    other => self.stuck(&format!("KVM_EXIT_SYSTEM_EVENT of type {other}")),
                });
            }
            Err(error) if matches!(error.errno(), libc::EINTR | libc::EAGAIN) => {
                count(&exits.interrupted);
                return Left::Handled;
            }
            Ok(VcpuExit::Unsupported(KVM_EXIT_ARM_NISV)) => {
                "the guest used an instruction on a device's register that KVM cannot emulate \
                 (KVM_EXIT_ARM_NISV)"
                    .to_owned()
            }
            Ok(other) => format!("{other:?}"),
            Err(error) if error.errno() == libc::EFAULT => {
                "the host could not give a page of guest memory (KVM_RUN: bad address): is its \
                 memory or hugetlb pool exhausted?"
                    .to_owned()
            }
            Err(error) => {
                let reason = exit::name(self.fd.get_kvm_run().exit_reason);
                format!("KVM_RUN: {error} (last exit: {reason})")
            }
        };
        count(&exits.other);
        Left::Ended(self.stuck(&what))
    }

    fn stuck(&self, what: &str) -> End {
        let pc = crate::arch::native::pc(&self.fd)
            .map_or_else(String::new, |pc| format!(", program counter {pc:#x}"));
        End::Stuck(format!("vCPU {}: {what}{pc}", self.index))
    }
}
