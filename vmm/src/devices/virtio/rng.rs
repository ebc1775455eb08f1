// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Entropy device (virtio 1.2, section 5.4): reads random numbers from the host's kernel.

use rustix::rand::{GetRandomFlags, getrandom};
use virtio_bindings::virtio_ids::VIRTIO_ID_RNG;

use super::{ConfigSpace, DeviceError, DeviceProperties, Direction, Queue, VirtioDevice};

/// Maximum number of bytes per request, even if its buffers are larger.
const MAX_REQUEST_SIZE: usize = 4096;

/// Entropy device.
#[derive(Debug)]
pub struct Rng;

impl VirtioDevice for Rng {
    fn properties(&self) -> DeviceProperties {
        DeviceProperties {
            device_type: VIRTIO_ID_RNG,
            features: 0,
            queue_sizes: &[64],
            config: ConfigSpace::new(Vec::new(), 0..0),
        }
    }

    fn process_queue(&mut self, _: usize, queue: &mut Queue) -> Result<(), DeviceError> {
        queue.serve_available(|chain| {
            let mut bytes = [0; MAX_REQUEST_SIZE];
            let requested = chain.length(Direction::Writable).min(MAX_REQUEST_SIZE);
            let mut filled = 0;
            while filled < requested {
                let rest = &mut bytes[filled..requested];
                filled +=
                    rustix::io::retry_on_intr(|| getrandom(&mut *rest, GetRandomFlags::empty()))
                        .map_err(DeviceError::host_call("reading random numbers (getrandom)"))?;
            }
            Ok(chain.write(0, &bytes[..requested]))
        })
    }
}
