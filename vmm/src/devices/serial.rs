// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The 16550 serial port, by `vm-superio`: the guest's console.
//!
//! What the guest sends is written to the output at once. What comes in waits in a FIFO of 64
//! bytes; [`feed`] reads a file descriptor in a thread of its own, passes on no more than there is
//! room for, and waits until the guest has read. The port's registers are bytes.

use std::{
    fmt, io,
    os::fd::{AsFd, AsRawFd as _, BorrowedFd},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use parking_lot::{Condvar, Mutex};
use rustix::event::{PollFd, PollFlags, poll};
use vm_superio::{Trigger, serial::SerialEvents};
use vmm_sys_util::eventfd::EventFd;

use super::{Description, MmioDevice};

/// Where the guest's output goes.
pub type Output = Box<dyn io::Write + Send>;

/// The port.
pub struct Serial {
    port: vm_superio::Serial<Interrupt, Arc<Drained>, Output>,
    refused: u64,
    output_failed: bool,
}

struct Interrupt(EventFd);

impl Trigger for Interrupt {
    type E = io::Error;

    fn trigger(&self) -> io::Result<()> {
        self.0.write(1)
    }
}

/// A serial port that can be fed.
pub trait Port: MmioDevice {
    /// Takes as much of `input` as there is room for, and says how much that was.
    fn receive(&mut self, input: &[u8]) -> usize;

    /// What the port tells when the guest has read everything.
    fn drained(&self) -> &Arc<Drained>;
}

/// Tells the feeding thread that the guest has read everything.
#[derive(Debug, Default)]
pub struct Drained {
    full: Mutex<bool>,
    changed: Condvar,
}

impl Drained {
    /// The guest has read everything.
    pub fn tell(&self) {
        *self.full.lock() = false;
        self.changed.notify_all();
    }
}

impl SerialEvents for Drained {
    fn buffer_read(&self) {}
    fn out_byte(&self) {}
    fn tx_lost_byte(&self) {}

    fn in_buffer_empty(&self) {
        self.tell();
    }
}

impl fmt::Debug for Serial {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Serial").finish_non_exhaustive()
    }
}

impl Serial {
    /// Bytes of registers.
    pub const SIZE: u64 = 0x1000;

    /// A port that interrupts by `irq` and writes to `output`.
    #[must_use]
    pub fn new(irq: EventFd, output: Output) -> Self {
        let drained = Arc::new(Drained::default());
        Self {
            port: vm_superio::Serial::with_events(Interrupt(irq), drained, output),
            refused: 0,
            output_failed: false,
        }
    }

    /// For the device tree, with a register every byte. The node also needs `clock-frequency`.
    #[must_use]
    pub fn describe(start: u64, irq: u32) -> Description {
        Description {
            name: "serial".to_owned(),
            start,
            size: Self::SIZE,
            irq: Some(irq),
            compatible: &["ns16550a"],
        }
    }
}

impl Port for Serial {
    fn receive(&mut self, input: &[u8]) -> usize {
        let room = self.port.fifo_capacity().min(input.len());
        if room == 0 {
            return 0;
        }
        self.port
            .enqueue_raw_bytes(&input[..room])
            .unwrap_or_else(|error| {
                log::debug!("serial input: {error}");
                0
            })
    }

    fn drained(&self) -> &Arc<Drained> {
        self.port.events()
    }
}

impl MmioDevice for Serial {
    fn read(&mut self, offset: u64, data: &mut [u8]) {
        match (u8::try_from(offset), &mut *data) {
            (Ok(offset @ 0..=7), [byte]) => *byte = self.port.read(offset),
            _ => {
                data.fill(0);
                self.refused += 1;
            }
        }
    }

    fn write(&mut self, offset: u64, data: &[u8]) {
        let result = match (u8::try_from(offset), data) {
            (Ok(offset @ 0..=7), [byte]) => self.port.write(offset, *byte),
            _ => {
                self.refused += 1;
                return;
            }
        };
        if let Err(error) = result
            && !self.output_failed
        {
            self.output_failed = true;
            log::warn!("the guest's console output is lost from here on: {error}");
        }
    }

    fn refused(&self) -> u64 {
        self.refused
    }
}

/// A thread that carries input from a file descriptor to the port. Dropping it ends the thread.
#[derive(Debug)]
pub struct Feed {
    stop: Arc<EventFd>,
    stopped: Arc<AtomicBool>,
    thread: Option<thread::JoinHandle<()>>,
}

impl Drop for Feed {
    fn drop(&mut self) {
        self.stopped.store(true, Ordering::Relaxed);
        let told = self.stop.write(1).is_ok();
        if let (true, Some(thread)) = (told, self.thread.take()) {
            // A thread that panicked has said so itself.
            let _ = thread.join();
        }
    }
}

/// Reads `input` until its end and gives the port what `filter` lets through of it. The filter may
/// change the bytes in place or take some out: it is where an escape key is found. It returns
/// `false` when input is to end.
///
/// # Errors
/// No event file descriptor or no thread can be had.
pub fn feed(
    serial: Arc<Mutex<dyn Port>>,
    input: impl AsFd + Send + 'static,
    mut filter: impl FnMut(&mut Vec<u8>) -> bool + Send + 'static,
) -> io::Result<Feed> {
    let stop = Arc::new(EventFd::new(libc::EFD_NONBLOCK)?);
    let stopped = Arc::new(AtomicBool::new(false));
    let (event, flag) = (Arc::clone(&stop), Arc::clone(&stopped));
    let thread = thread::Builder::new()
        .name("serial-in".to_owned())
        .spawn(move || {
            let mut bytes = Vec::new();
            while !flag.load(Ordering::Relaxed) {
                bytes.clear();
                match next(&input, event.as_ref(), &mut bytes) {
                    Ok(0) => break,
                    Ok(_) => {}
                    Err(error) => {
                        log::warn!("the guest gets no more console input: {error}");
                        break;
                    }
                }
                let go_on = filter(&mut bytes);
                deliver(serial.as_ref(), &bytes, &flag);
                if !go_on {
                    break;
                }
            }
        })?;
    Ok(Feed {
        stop,
        stopped,
        thread: Some(thread),
    })
}

/// Waits for input and reads it; 0 at its end or when told to stop.
fn next(input: &impl AsFd, stop: &EventFd, bytes: &mut Vec<u8>) -> io::Result<usize> {
    loop {
        let stop = stop.as_raw_fd();
        // SAFETY: the borrow ends before the event does.
        let stop = unsafe { BorrowedFd::borrow_raw(stop) };
        let mut fds = [
            PollFd::new(input, PollFlags::IN),
            PollFd::from_borrowed_fd(stop, PollFlags::IN),
        ];
        match poll(&mut fds, None) {
            Err(rustix::io::Errno::INTR) => continue,
            other => other?,
        };
        if !fds[1].revents().is_empty() {
            return Ok(0);
        }
        let mut buffer = [0; 64];
        match rustix::io::read(input, &mut buffer) {
            Err(rustix::io::Errno::INTR | rustix::io::Errno::AGAIN) => {}
            Err(error) => return Err(error.into()),
            Ok(count) => {
                bytes.extend_from_slice(&buffer[..count]);
                return Ok(count);
            }
        }
    }
}

/// Gives the port all the bytes, waiting while its FIFO is full.
fn deliver(serial: &Mutex<dyn Port>, mut bytes: &[u8], stopped: &AtomicBool) {
    while !bytes.is_empty() && !stopped.load(Ordering::Relaxed) {
        let (taken, drained) = {
            let mut serial = serial.lock();
            let taken = serial.receive(bytes);
            let drained = Arc::clone(serial.drained());
            // Under the port's lock, so that the guest cannot drain it in between.
            *drained.full.lock() = taken < bytes.len();
            (taken, drained)
        };
        bytes = &bytes[taken..];
        let mut full = drained.full.lock();
        while *full && !stopped.load(Ordering::Relaxed) {
            // The guest may never read: look at `stopped` now and then.
            drained
                .changed
                .wait_for(&mut full, Duration::from_millis(100));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::{super::testing::Page, *};

    struct Full;

    impl Write for Full {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            Err(io::ErrorKind::StorageFull.into())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn event() -> EventFd {
        EventFd::new(libc::EFD_NONBLOCK).unwrap()
    }

    #[test]
    fn what_the_guest_sends_comes_out() {
        let page = Page::default();
        let mut serial = Serial::new(event(), Box::new(page.clone()));

        for byte in b"login:" {
            serial.write(0, &[*byte]);
        }

        assert_eq!(*page.0.lock(), b"login:");
    }

    #[test]
    fn accesses_that_are_no_byte_registers_are_refused() {
        let mut serial = Serial::new(event(), Box::new(Page::default()));
        let mut data = [9; 4];

        serial.read(0, &mut data);
        serial.write(8, &[1]);
        serial.write(0x100, &[1]);

        assert_eq!((data, serial.refused()), ([0; 4], 3));
    }

    #[test]
    fn output_that_cannot_be_written_stops_nothing() {
        let mut serial = Serial::new(event(), Box::new(Full));

        serial.write(0, b"a");
        serial.write(0, b"b");

        assert!(serial.output_failed);
    }

    #[test]
    fn more_input_than_the_fifo_holds_arrives_in_order() {
        let irq = event();
        let serial = Serial::new(irq.try_clone().unwrap(), Box::new(Page::default()));
        let serial = Arc::new(Mutex::new(serial));
        let (input, mut keyboard) = io::pipe().unwrap();
        let typed: Vec<u8> = (0..200).collect();
        serial.lock().write(1, &[1]);
        let feed = feed(Arc::clone(&serial) as _, input, |bytes| {
            bytes.retain(|byte| *byte != 100);
            true
        });

        keyboard.write_all(&typed).unwrap();
        let mut got = Vec::new();
        while got.len() < 199 {
            let mut serial = serial.lock();
            let mut data = [0];
            serial.read(5, &mut data);
            if data[0] & 1 == 1 {
                serial.read(0, &mut data);
                got.push(data[0]);
            }
        }

        assert!(got.iter().copied().eq((0..200).filter(|byte| *byte != 100)));
        assert!(irq.read().unwrap() > 0);
        drop(feed.unwrap());
    }

    #[test]
    fn feeding_ends_when_dropped_though_the_guest_reads_nothing() {
        let serial = Serial::new(event(), Box::new(Page::default()));
        let (input, mut keyboard) = io::pipe().unwrap();
        let feed = feed(Arc::new(Mutex::new(serial)), input, |_| true).unwrap();
        keyboard.write_all(&[7; 500]).unwrap();

        drop(feed);

        assert!(keyboard.write_all(&[7]).is_err());
    }
}
