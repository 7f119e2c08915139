//! What is free on the nodes that stay: what the removal of a further node needs beyond it, without a plan.

use std::collections::BTreeSet;

use crate::decisions::disruption::size::{Size, less, sum};

/// What is free on a node that pods may move to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Room {
    /// The node, if it may be removed, too.
    pub source: Option<usize>,
    pub free: Size,
}

/// Rooms with their CPU before pods are placed, ascending by that.
#[derive(Clone, Debug, Default)]
pub struct Rooms(Vec<(i64, Room)>);

impl Rooms {
    pub fn new(mut rooms: Vec<Room>) -> Self {
        rooms.retain(|room| room.free.iter().all(|free| *free > 0));
        rooms.sort_by_key(|room| room.free);
        Self(rooms.into_iter().map(|room| (room.free[0], room)).collect())
    }

    /// What the pods of a source need beyond the rooms on other nodes: each takes the room of least CPU that holds it. As if only CPU and memory decided:
    /// a plan seldom needs less. Takes a step for each room that it looks at; `None` without enough of them.
    pub fn missing(&mut self, source: usize, pods: &[Size], steps: &mut usize) -> Option<Size> {
        let placed = self.place(pods, |other| other != source, steps);
        self.undo(&placed);
        placed.missing
    }

    /// Sources, in order, that each gain more than new nodes cost for those of their pods that have no room after the pods of the earlier ones took theirs.
    /// None of them has a room that pods of another one take. Ends without enough steps.
    pub fn select<'s>(
        mut self,
        sources: impl Iterator<Item = (usize, &'s [Size], i64)>,
        cost: impl Fn(Size) -> i64,
        steps: &mut usize,
    ) -> BTreeSet<usize> {
        let (mut selected, mut taken) = (BTreeSet::new(), BTreeSet::new());
        for (source, pods, gain) in sources {
            if taken.contains(&source) {
                continue;
            }
            let placed = self.place(pods, |other| other != source && !selected.contains(&other), steps);
            let Some(missing) = placed.missing else { break };
            if gain > cost(missing) {
                selected.insert(source);
                taken.extend(placed.places.iter().filter_map(|(at, _)| self.0[*at].1.source));
            } else {
                self.undo(&placed);
            }
        }
        selected
    }

    fn place(&mut self, pods: &[Size], stays: impl Fn(usize) -> bool, steps: &mut usize) -> Placed {
        let (mut out, mut without) = (Placed { missing: Some([0; 2]), places: Vec::new() }, None);
        for pod in pods {
            if without == Some(pod) {
                // As large as the last one, which has no room.
                out.missing = out.missing.map(|missing| sum(missing, *pod));
                continue;
            }
            let mut place = None;
            for at in self.0.partition_point(|(cpu, _)| *cpu < pod[0])..self.0.len() {
                let Some(left) = steps.checked_sub(1) else {
                    out.missing = None;
                    return out;
                };
                *steps = left;
                let room = &self.0[at].1;
                if room.free[0] >= pod[0] && room.free[1] >= pod[1] && room.source.is_none_or(&stays) {
                    place = Some(at);
                    break;
                }
            }
            if let Some(at) = place {
                self.0[at].1.free = less(self.0[at].1.free, *pod);
                out.places.push((at, *pod));
            } else {
                without = Some(pod);
                out.missing = out.missing.map(|missing| sum(missing, *pod));
            }
        }
        out
    }

    fn undo(&mut self, placed: &Placed) {
        for (at, pod) in &placed.places {
            self.0[*at].1.free = sum(self.0[*at].1.free, *pod);
        }
    }
}

/// Where pods are placed.
struct Placed {
    /// What those need that have no room; `None` where the steps did not suffice.
    missing: Option<Size>,
    /// Index of a room, and the pod in it.
    places: Vec<(usize, Size)>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pods_take_the_rooms_of_other_nodes_and_the_rest_is_missing() {
        let room = |source, cpu, memory| Room { source, free: [cpu, memory] };
        let mut rooms = Rooms::new(vec![room(Some(0), 9, 9), room(None, 4, 2), room(Some(1), 2, 8), room(None, 8, 0)]);
        for (case, source, pods, expected) in [
            ("all have room", 0, &[[3, 1], [2, 7], [1, 1]][..], [0, 0]),
            ("rooms are used up", 0, &[[3, 1], [2, 7], [2, 1]], [2, 1]),
            ("its own room does not count", 1, &[[2, 8]], [0, 0]),
            ("nor does it for the others", 0, &[[5, 5], [2, 8]], [5, 5]),
            ("memory decides", 0, &[[1, 9]], [1, 9]),
            ("a node without memory has no room", 0, &[[5, 0]], [5, 0]),
            ("no pods", 0, &[], [0, 0]),
        ] {
            assert_eq!(rooms.missing(source, pods, &mut 100), Some(expected), "{case}");
        }
        let mut steps = 3;
        assert_eq!(rooms.missing(0, &[[1, 9], [1, 9]], &mut steps), Some([2, 18]), "one look for pods of a size");
        assert_eq!(rooms.missing(0, &[[1, 9], [1, 8]], &mut steps), None, "not enough steps");
    }

    #[test]
    fn sources_are_selected_while_their_pods_have_room_or_new_nodes_for_them_cost_less() {
        let room = |source, cpu| Room { source: Some(source), free: [cpu, 9] };
        let rooms = Rooms::new(vec![room(0, 9), room(1, 7), room(2, 4), room(3, 1)]);
        let pods: [&[Size]; 4] = [&[[1, 1]], &[[2, 1], [1, 1]], &[[1, 1], [4, 1]], &[[10, 1]]];
        let select = |gains: [i64; 4], mut steps| {
            let sources = pods.iter().zip(gains).enumerate().map(|(at, (pods, gain))| (at, *pods, gain));
            rooms.clone().select(sources, |missing| 10 * missing[0], &mut steps).into_iter().collect::<Vec<_>>()
        };
        // The pod of 0 takes the room of 3, and those of 1 that of 2: neither is removed then.
        assert_eq!(select([8, 8, 99, 99], 99), [0, 1]);
        // 1 is not worth its removal: the pods of 2 go there.
        assert_eq!(select([8, 0, 8, 99], 99), [0, 2]);
        // The pod of 3 has no room: it needs ten cores.
        assert_eq!((select([0, 0, 0, 101], 99), select([0, 0, 0, 100], 99)), (vec![3], vec![]));
        assert_eq!(select([8, 8, 99, 99], 1), [0], "the steps end");
    }
}
