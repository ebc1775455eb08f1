// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The vCPU threads.
//!
//! All of them look at one [`Wanted`] before they enter the guest: run, stand still, or end. To
//! change it, say so first and then [kick](crate::kvm::kick) every vCPU; a thread forgets kicks
//! before it looks, so it either sees what is wanted or is kicked out again.
//!
//! A vCPU that wrote to the console's port waits behind that until there is room for more, unless
//! something else is wanted of it meanwhile: a reader that stalls makes the guest wait, and never
//! whoever pauses or ends it.
//!
//! A vCPU thread that finds the guest at its end (or cannot go on) tells the main thread and then
//! waits like all others: only the main thread ends a machine.

use std::{
    io,
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
        mpsc,
    },
    thread::{self, JoinHandle},
};

use granule_types::units::GuestAddress;
use kvm_bindings::{
    KVM_EXIT_ARM_NISV, KVM_EXIT_DIRTY_RING_FULL, KVM_SYSTEM_EVENT_CRASH, KVM_SYSTEM_EVENT_RESET,
    KVM_SYSTEM_EVENT_SHUTDOWN,
};
use kvm_ioctls::{VcpuExit, VcpuFd};
use parking_lot::{Condvar, Mutex};
use vmm_sys_util::eventfd::EventFd;

use crate::{
    devices::{Bus, console_output::ConsoleOutput},
    kvm::{
        dirty_ring::DirtyRings,
        exit,
        kick::{KickTarget, Kicker},
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

/// What has a vCPU wait that writes to the console faster than it is read.
#[derive(Debug)]
pub struct Brake {
    /// Addresses of the port.
    pub port: Range<u64>,
    /// Where its output goes.
    pub outlet: ConsoleOutput,
}

/// What all vCPU threads share.
#[derive(Debug)]
struct Shared {
    wanted: Mutex<Gate>,
    changed: Condvar,
    bus: Arc<Bus>,
    rings: Option<Arc<DirtyRings>>,
    brake: Option<Brake>,
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
    /// Where the VM has dirty rings, they are emptied when one is full. `brake` is the console's.
    /// `ended` is written to when [`Crew::end`] has something to say.
    ///
    /// # Errors
    /// A thread cannot be had, or not be prepared.
    pub fn start(
        vcpus: Vec<VcpuFd>,
        bus: Arc<Bus>,
        rings: Option<Arc<DirtyRings>>,
        brake: Option<Brake>,
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
            brake,
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
                anchor: KickTarget::default(),
                fd,
                post: Post {
                    index,
                    shared: Arc::clone(&crew.shared),
                    to_main: to_main.clone(),
                },
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
            self.kickers.iter().for_each(Kicker::kick);
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

    /// Waits behind a store while it leaves the console no room and the guest is to run.
    fn hold(&self, address: u64) {
        if let Some(brake) = &self.brake
            && brake.port.contains(&address)
        {
            brake
                .outlet
                .wait_for_space(|| self.wanted.lock().wanted != Wanted::Run);
        }
    }
}

/// A vCPU's place among the others.
struct Post {
    index: usize,
    shared: Arc<Shared>,
    to_main: mpsc::Sender<End>,
}

impl Post {
    fn tell(&self, end: End) {
        // The main thread is there for as long as vCPUs are: it joins them.
        let _ = self.to_main.send(end);
        let _ = self.shared.ended.write(1);
    }
}

impl Drop for Post {
    fn drop(&mut self) {
        if thread::panicking() {
            let why = format!("vCPU {}: its thread panicked", self.index);
            self.tell(End::Stuck(why));
            let mut gate = self.shared.wanted.lock();
            gate.standing += 1;
            self.shared.changed.notify_all();
        }
    }
}

/// A vCPU on its thread.
struct Vcpu {
    // Before `fd`: kicks must have become harmless when the vCPU goes.
    anchor: KickTarget,
    fd: VcpuFd,
    post: Post,
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
        let kicker = self.anchor.bind(&mut self.fd);
        let ready = kicker.and_then(|kicker| prepare().map(|()| kicker));
        let failed = ready.is_err();
        if tied.send(ready).is_err() || failed {
            return;
        }
        loop {
            self.anchor.clear_kicks();
            if self.post.shared.wait() == Wanted::End {
                return;
            }
            if let Left::Ended(end) = self.enter() {
                self.post.tell(end);
                self.rest();
                return;
            }
        }
    }

    /// Stands still until the machine ends: this vCPU never enters the guest again.
    fn rest(&self) {
        let shared = &self.post.shared;
        let mut gate = shared.wanted.lock();
        gate.standing += 1;
        shared.changed.notify_all();
        while gate.wanted != Wanted::End {
            shared.changed.wait(&mut gate);
        }
    }

    /// Enters the guest once.
    fn enter(&mut self) -> Left {
        let shared = &self.post.shared;
        let exits = &shared.exits;
        let count = |counter: &AtomicU64| {
            counter.fetch_add(1, Ordering::Relaxed);
        };
        let what = match self.fd.run() {
            Ok(VcpuExit::MmioRead(address, data)) => {
                count(&exits.mmio_reads);
                shared.bus.read(GuestAddress(address), data);
                return Left::Handled;
            }
            Ok(VcpuExit::MmioWrite(address, data)) => {
                count(&exits.mmio_writes);
                shared.bus.write(GuestAddress(address), data);
                shared.hold(address);
                return Left::Handled;
            }
            Ok(VcpuExit::Unsupported(KVM_EXIT_DIRTY_RING_FULL)) if shared.rings.is_some() => {
                count(&exits.other);
                let rings = shared.rings.as_ref();
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
                // SAFETY: the exit's reason says that this is the field in use.
                let fault = unsafe { self.fd.get_kvm_run().__bindgen_anon_1.arm_nisv };
                format!(
                    "the guest used an instruction on the device's register at {:#x} that KVM \
                     cannot emulate (KVM_EXIT_ARM_NISV)",
                    fault.fault_ipa
                )
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
        let pc = crate::arch::vm::program_counter(&self.fd)
            .map_or_else(String::new, |pc| format!(", program counter {pc:#x}"));
        End::Stuck(format!("vCPU {}: {what}{pc}", self.post.index))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::devices::{REGISTER_SPACE, Serial, serial::SerialPort as _};

    const PORT: u64 = 0x1000;

    /// A crew of one whose thread the test plays.
    fn crew(bus: Bus, brake: Option<Brake>) -> (Crew, Post) {
        let exits = Arc::new(Exits::default());
        let (to_main, ends) = mpsc::channel();
        let shared = Arc::new(Shared {
            wanted: Mutex::new(Gate {
                wanted: Wanted::Run,
                standing: 0,
            }),
            changed: Condvar::new(),
            bus: Arc::new(bus),
            rings: None,
            brake,
            exits: Arc::clone(&exits),
            ended: EventFd::new(libc::EFD_NONBLOCK).unwrap(),
            size: 1,
        });
        let post = Post {
            index: 7,
            shared: Arc::clone(&shared),
            to_main,
        };
        let crew = Crew {
            shared,
            kickers: Vec::new(),
            threads: Vec::new(),
            ends,
            exits,
        };
        (crew, post)
    }

    #[test]
    fn a_thread_that_panics_ends_the_machine_and_holds_nobody_up() {
        let (mut crew, post) = crew(Bus::new(), None);

        crew.threads.push(thread::spawn(move || {
            let _post = post;
            panic!("on purpose, by a test");
        }));

        // Waits for it to stand still, which it never would by itself.
        crew.pause();
        let why = "vCPU 7: its thread panicked".to_owned();
        assert_eq!(crew.end(), Some(End::Stuck(why)));
        assert_eq!(crew.shared.ended.read().unwrap(), 1);
    }

    #[test]
    fn a_console_that_nobody_reads_stops_the_guest_and_not_its_pause_and_end() {
        let (_screen, to) = io::pipe().unwrap();
        let outlet = ConsoleOutput::new(to, || Ok(())).unwrap();
        let irq = EventFd::new(libc::EFD_NONBLOCK).unwrap();
        let serial = Serial::new(irq, Box::new(outlet.clone()));
        let serial = Arc::new(Mutex::new(serial));
        let mut bus = Bus::new();
        bus.add(
            Serial::describe(GuestAddress(PORT), 0),
            Arc::clone(&serial) as _,
        )
        .unwrap();
        let brake = Brake {
            port: PORT..PORT + REGISTER_SPACE,
            outlet: outlet.clone(),
        };
        let (mut crew, post) = crew(bus, Some(brake));
        crew.threads.push(thread::spawn(move || {
            let shared = &post.shared;
            while shared.wait() == Wanted::Run {
                shared.bus.write(GuestAddress(PORT), b"x");
                shared.hold(PORT);
            }
        }));
        while outlet.wait_for_space(|| true) {
            thread::sleep(Duration::from_millis(1));
        }

        // It waits without the port's lock: keys are still taken.
        assert_eq!(serial.lock().receive(b"key"), 3);
        crew.pause();
        assert_eq!(crew.wanted(), Wanted::Pause);
        crew.want(Wanted::Run);
        drop(crew);

        assert!(outlet.finish() > 0);
    }
}
