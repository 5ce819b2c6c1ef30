package index

import (
	"encoding/binary"
	"encoding/hex"

	"prefixgate/internal/block"
)

// schemaVersion is part of every key. Raise it whenever what is written under a key, or where chains are cut, changes:
// gateways of both versions then live side by side on one Redis, each with its own entries.
const schemaVersion = "1"

// The fields of a run's hash besides those of its holders, which are their 8-byte keys. Each value says by its first byte what it
// is, so that a lookup can ask for the values only, half of what Redis would have to send, one by one, and the client to read.
const (
	fieldPath   = "p"
	fieldNested = "n"
	kindPath    = 'p' // run.path
	kindNested  = 'n' // offsets, 2 bytes each
	kindHolder  = 'h' // the holder's key, then its claims
	stepBytes   = 10  // of a claim: blocks 2, check 2, time 6
)

// keyOf returns the Redis key of the run that starts at block h, such as "pg1:00f3a99e0c2b7d41".
func (x *Redis) keyOf(h block.Hash) string {
	var raw [8]byte
	binary.BigEndian.PutUint64(raw[:], uint64(h))
	buf := make([]byte, 0, len(x.prefix)+16)
	buf = append(buf, x.prefix...)
	return string(hex.AppendEncode(buf, raw[:]))
}

func encodePath(path string) string { return string(kindPath) + path }

func encodeNested(offsets []uint16) string {
	b := make([]byte, 1, 1+2*len(offsets))
	b[0] = kindNested
	for _, o := range offsets {
		b = binary.LittleEndian.AppendUint16(b, o)
	}
	return string(b)
}

// encodeHolder returns the name of a holder's field.
func encodeHolder(holder uint64) string {
	var b [8]byte
	binary.LittleEndian.PutUint64(b[:], holder)
	return string(b[:])
}

// encodeClaims returns the field of a holder with all its claims.
func encodeClaims(claims []claim, holder uint64) string {
	b := binary.LittleEndian.AppendUint64([]byte{kindHolder}, holder)
	for _, c := range claims {
		if c.holder != holder {
			continue
		}
		b = binary.LittleEndian.AppendUint16(b, c.blocks)
		b = binary.LittleEndian.AppendUint16(b, c.check)
		b = append(b, byte(c.at), byte(c.at>>8), byte(c.at>>16), byte(c.at>>24), byte(c.at>>32), byte(c.at>>40))
	}
	return string(b)
}

// decodeRun reads a run from the values of its hash; nil if there is none. What does not look like ours is passed
// over: anybody may write under our keys.
func decodeRun(values []string) *run {
	if len(values) == 0 {
		return nil
	}
	r := &run{claims: make([]claim, 0, len(values))}
	for _, v := range values {
		if v == "" {
			continue
		}
		kind, v := v[0], v[1:]
		switch kind {
		case kindPath:
			// Holding on to the string Redis' answer came in saves a copy, most of what a lookup of a long prompt would allocate.
			if len(v) < 4*longestSegment {
				r.path = v[:len(v)/4*4]
			}
		case kindNested:
			for r.nested = r.nested[:0]; len(v) >= 2 && len(r.nested) < maxNested; v = v[2:] {
				r.nested = append(r.nested, uint16(v[0])|uint16(v[1])<<8)
			}
		case kindHolder:
			if len(v) < 8 || len(v)%stepBytes != 8 || len(v) > 8+stepBytes*(maxSteps+1) {
				continue
			}
			holder := binary.LittleEndian.Uint64([]byte(v))
			for v = v[8:]; len(v) > 0; v = v[stepBytes:] {
				r.claims = append(r.claims, claim{
					holder: holder,
					blocks: uint16(v[0]) | uint16(v[1])<<8,
					check:  uint16(v[2]) | uint16(v[3])<<8,
					at: int64(v[4]) | int64(v[5])<<8 | int64(v[6])<<16 | int64(v[7])<<24 |
						int64(v[8])<<32 | int64(v[9])<<40,
				})
			}
		}
	}
	return r
}
